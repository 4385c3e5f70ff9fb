// The two kernels of an elementwise op: the map, and the map of its backward, which also sums gradients.
//
// The functor OP holds the arithmetic (<op>.cuh). What differs from op to op and from dtype to dtype is defined above this text
// by cupyfused/_kernel.py:
//
//   OP, KERNEL                 the functor and the kernel's name, which profilers show
//   ARITHMETIC                 the type that the arithmetic runs in
//   RESULT                     the type that y is stored in
//   OPERANDS(F)                F(k, name, type, form) for each tensor: how it is stored, and its enum Form
//   SCALARS(F)                 F(k, name) for each option and, in backward, for each further number
//   GRADIENTS(F)               F(k, name, type, duties) for each gradient: what may be asked of it (backward only)
//   ARGUMENTS                  the functor's arguments for element e of packet i
//   OPERAND_COUNT, SCALAR_COUNT, GRADIENT_COUNT, WIDTH, ITEMS, BLOCK, MAX_DIMS, INDEX, STRIDE
//
// A thread takes ITEMS packets of WIDTH neighbours: one packet of 16 bytes where the layout allows it, else as many single
// elements, BLOCK apart so that the threads of a warp stay side by side. All loads are issued before the first use.

typedef ARITHMETIC A;

#define ELEMENT_OF(name) name[i].get(e)
#define DECLARE(k, name, T, form) Packet<T, A, WIDTH, form> name[ITEMS];
#define DECLARE_SCALAR(k, name) \
    const Optional<A> name = {load_scalar<A>(p.scalar_address[k], p.scalar[k]), p.scalar[k].access != ABSENT};

#ifdef FORWARD

// Operand 0 is y, the inputs follow. An address is a number's bits where the operand is a number.
struct MapParameters {
    uint64 address[OPERAND_COUNT];
    uint64 scalar_address[SCALAR_COUNT + 1];  // one more than there are: an array needs an element
    Operand operand[OPERAND_COUNT];
    Scalar scalar[SCALAR_COUNT + 1];
    Dims dims;
    uint64 packets;
    uint64 last;   // packet along dim 0, which has only `tail` elements
    int32 tail;
    int32 ndim;
};

extern "C" __global__ void __launch_bounds__(BLOCK) KERNEL(const __grid_constant__ MapParameters p)
{
    OPERANDS(DECLARE)
    SCALARS(DECLARE_SCALAR)
    int64 offset[ITEMS][OPERAND_COUNT];
    int valid[ITEMS];
    INDEX first = (INDEX)blockIdx.x * (BLOCK * ITEMS) + threadIdx.x;

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        INDEX packet = first + i * BLOCK;
        valid[i] = 0;
        if (packet >= p.packets) continue;
        for (int k = 0; k < OPERAND_COUNT; ++k) offset[i][k] = 0;
        INDEX place = add_packet_offsets<OPERAND_COUNT>(p.dims, 0, p.ndim, packet, p.operand, offset[i]);
        valid[i] = place == (INDEX)p.last ? p.tail : WIDTH;
#define LOAD(k, name, T, form) if (k > 0) name[i].load(p.address[k], offset[i][k], p.operand[k], valid[i]);
        OPERANDS(LOAD)
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (valid[i] == 0) continue;
#define SETTLE(k, name, T, form) if (k > 0) name[i].settle(p.address[k], p.operand[k]);
        OPERANDS(SETTLE)
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) result[i].set(e, OP::forward<A>(ARGUMENTS));
        result[i].store(p.address[0], offset[i][0], p.operand[0], valid[i]);
    }
}

#else

// The dims of the iteration fall into three groups, in this order:
//   position   dim 0, or none: a thread keeps its place along it, so it can sum over the loop in registers
//   loop       walked by each thread, `lanes` apart; at least one gradient is summed over it
//   grid       one block (or `splits` of them) for each index
// and each gradient is one of
enum Role : uint8 {
    UNWANTED,
    EACH,     // of full size: stored as it comes
    COLUMN,   // keeps the position: a sum over the loop for each element of the packet
    ALL,      // a sum over the loop and over the positions of the block
    ROW,      // keeps the loop, sums over the positions: one store for each step and tile
};
// The sums of one block go to the gradient itself if nothing is left to add, else to a workspace that sum_partials finishes.

// Operand 0 is grad_out, the inputs follow, then the gradients.
struct SumParameters {
    uint64 address[OPERAND_COUNT + GRADIENT_COUNT];
    uint64 scalar_address[SCALAR_COUNT + 1];
    Operand operand[OPERAND_COUNT + GRADIENT_COUNT];
    Scalar scalar[SCALAR_COUNT + 1];
    Dims dims;
    int64 split_stride[GRADIENT_COUNT];
    int64 tile_stride[GRADIENT_COUNT];
    uint64 loop;            // indices of the loop dims together
    uint64 loop_per_split;
    uint64 positions;       // packets along dim 0 if that is the position, else 1
    uint64 last;            // packet along dim 0, which has only `tail` elements
    uint32 splits;
    uint32 tiles;           // blocks along the position
    int32 tail;
    int32 position_lanes;   // threads along the position, a power of two up to 32; the others share the loop
    int32 loop_begin;       // 1 with a position dim, else 0
    int32 loop_end;
    int32 ndim;
    uint8 role[GRADIENT_COUNT];
};

// Where each tensor begins for this block, and for the thread's position.
template <typename I> __device__ __forceinline__ void block_offsets(const SumParameters& p, I position, int64 (&base)[OPERAND_COUNT + GRADIENT_COUNT])
{
#pragma unroll
    for (int k = 0; k < OPERAND_COUNT + GRADIENT_COUNT; ++k) base[k] = p.loop_begin ? advance(0, position, p.operand[k].stride[0]) : 0;
    add_offsets<OPERAND_COUNT + GRADIENT_COUNT>(p.dims, p.loop_end, p.ndim, (I)(blockIdx.x / p.splits / p.tiles), p.operand, base);
}

__device__ __forceinline__ void store_sum(const SumParameters& p, int k, int64 offset, A value)
{
    if (p.operand[OPERAND_COUNT + k].dtype == (sizeof(A) == 4 ? FLOAT32 : FLOAT64)) ((A*)p.address[OPERAND_COUNT + k])[offset] = value;
    else store_any<A>((void*)p.address[OPERAND_COUNT + k], offset, p.operand[OPERAND_COUNT + k].dtype, value);
}

// ROW: adds what the lanes of one step have.
__device__ __forceinline__ void store_row(const SumParameters& p, int k, A value, int64 offset, uint32 tile, bool stores)
{
    A total = sum_lanes(value, p.position_lanes);
    if (stores) store_sum(p, k, offset + tile * p.tile_stride[k], total);
}

// COLUMN: adds what the rows of the block have for each element of the packet. Packets are whole: a loop means a second dim, and
// with that dim 0 is made of whole packets.
__device__ __forceinline__ void store_columns(const SumParameters& p, int k, A (&sum)[WIDTH], int64 place, bool exists)
{
    sum_rows(sum, p.position_lanes);
    if (threadIdx.x >= p.position_lanes || !exists) return;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) store_sum(p, k, place + e * p.operand[OPERAND_COUNT + k].step, sum[e]);
}

// ALL: adds what all threads of the block have.
__device__ __forceinline__ void store_all(const SumParameters& p, int k, const A (&sum)[WIDTH], int64 place)
{
    A total[1] = {};
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) total[0] += sum[e];
    sum_rows(total, 1);
    if (threadIdx.x == 0) store_sum(p, k, place, total[0]);
}

// Budget: 68 lines, since the macros that go over operands and gradients stand where they are used.
extern "C" __global__ void __launch_bounds__(BLOCK) KERNEL(const __grid_constant__ SumParameters p)
{
    constexpr int ENTRIES = OPERAND_COUNT + GRADIENT_COUNT;
    const int lane = threadIdx.x % p.position_lanes, row = threadIdx.x / p.position_lanes, rows = BLOCK / p.position_lanes;
    const uint32 split = blockIdx.x % p.splits, tile = blockIdx.x / p.splits % p.tiles;
    const INDEX position = (INDEX)tile * p.position_lanes + lane;

    int64 base[ENTRIES];
    block_offsets(p, position, base);

    SCALARS(DECLARE_SCALAR)
    A sum[GRADIENT_COUNT][WIDTH] = {};
    const INDEX end = min((INDEX)p.loop, (INDEX)((split + 1) * p.loop_per_split));

    // Every thread of the block makes the same number of turns: ROW sums across a warp in each of them.
#pragma unroll 1
    for (INDEX turn = (INDEX)(split * p.loop_per_split); turn < end; turn += rows * ITEMS) {
        OPERANDS(DECLARE)
        int64 offset[ITEMS][ENTRIES];
        int valid[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            INDEX step = turn + i * rows + row;
            valid[i] = 0;
            if (step >= end || position >= p.positions) continue;
#pragma unroll
            for (int k = 0; k < ENTRIES; ++k) offset[i][k] = base[k];
            INDEX place = add_packet_offsets<ENTRIES>(p.dims, p.loop_begin, p.loop_end, step, p.operand, offset[i]);
            valid[i] = (p.loop_begin ? position : place) == (INDEX)p.last ? p.tail : WIDTH;
#define LOAD(k, name, T, form) name[i].load(p.address[k], offset[i][k], p.operand[k], valid[i]);
            OPERANDS(LOAD)
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
#define SETTLE_EACH(k, name, T, form) name[i].settle(p.address[k], p.operand[k]);
            OPERANDS(SETTLE_EACH)
            A row_sum[GRADIENT_COUNT] = {};
#define DECLARE_GRADIENT(k, name, T, duties) Packet<T, A, WIDTH, WIDTH == 1 ? EITHER : PACKETS> name;
            GRADIENTS(DECLARE_GRADIENT)
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
                A gradient[GRADIENT_COUNT];
                OP::backward<A>(ARGUMENTS);
                bool exists = e < valid[i];
#define TAKE(k, name, T, duties)                                                                                                 \
                if ((duties) & STORES) name.set(e, gradient[k]);                                                                 \
                if ((duties) & SUMS) sum[k][e] += exists ? gradient[k] : 0;                                                      \
                if ((duties) & SUMS_ROWS) row_sum[k] += exists ? gradient[k] : 0;
                GRADIENTS(TAKE)
            }
#define STORE(k, name, T, duties)                                                                                                \
            if ((duties) & STORES && p.role[k] == EACH && valid[i] > 0)                                                          \
                name.store(p.address[OPERAND_COUNT + k], offset[i][OPERAND_COUNT + k], p.operand[OPERAND_COUNT + k], valid[i]);  \
            if ((duties) & SUMS_ROWS && p.role[k] == ROW)                                                                        \
                store_row(p, k, row_sum[k], offset[i][OPERAND_COUNT + k], tile, lane == 0 && valid[i] > 0);
            GRADIENTS(STORE)
        }
    }

    const bool exists = position < p.positions;
    block_offsets(p, position, base);  // once more, rather than keep those of the sums in registers through the loop
#define FINISH(k, name, T, duties)                                                                                               \
    if ((duties) & SUMS) {                                                                                                       \
        int64 place = base[OPERAND_COUNT + k] + (int64)split * p.split_stride[k] + (int64)tile * p.tile_stride[k];               \
        if (p.role[k] == COLUMN) store_columns(p, k, sum[k], place, exists);                                                      \
        if (p.role[k] == ALL) store_all(p, k, sum[k], place);                                                                    \
    }
    GRADIENTS(FINISH)
}

#endif
