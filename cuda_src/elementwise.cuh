// The two kernels of an elementwise op: the map, and the map of its backward, which also sums gradients.
//
// Budget: some 315 lines; the two share the macros over operands and what a packet is, which two files would each have to say.
//
// The functor OP holds the arithmetic (<op>.cuh). What differs from op to op and from dtype to dtype is defined above this text
// by cupyfused/_source.py:
//
//   OP, KERNEL                 the functor and the kernel's name, which profilers show
//   ARITHMETIC                 the type that the arithmetic runs in
//   RESULT                     the type that y is stored in
//   OPERANDS(F)                F(k, name, type, form, held) for each tensor: how it is stored, its enum Form, and whether a thread of
//                              backward has one packet of it for its whole loop
//   SCALARS(F)                 F(k, name) for each option and, in backward, for each further number
//   GRADIENTS(F)               F(k, name, type, duties) for each gradient: what may be asked of it (backward only)
//   ARGUMENTS                  the functor's arguments for element e of packet i
//   GENERAL                    1 in the instance for whatever has none of its own
//   RESIDENT                   blocks of backward that run at once on a multiprocessor
//   OPERAND_COUNT, SCALAR_COUNT, GRADIENT_COUNT, WIDTH, ITEMS, BLOCK, MAX_DIMS, INDEX, STRIDE
//
// A thread takes ITEMS packets of WIDTH neighbours: 16 bytes each where the layout allows it, else as many single elements, BLOCK
// apart so that the threads of a warp stay side by side. All loads are issued before the first use. Packets are whole; what one
// dim has beyond the last of them, the first threads take one by one.

typedef ARITHMETIC A;

#define ELEMENT_OF(name) name[i].get(e)
#define DECLARE(k, name, T, form, held) Packet<T, A, WIDTH, form> name[ITEMS];
#define DECLARE_ONE(k, name, T, form, held) Packet<T, A, 1, form> name[1];
#define LOAD_ONE(k, name, T, form, held) \
    name[0].load(p.address[k], element * p.operand[k].step, p.operand[k]), name[0].settle(p.address[k], p.operand[k]);
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
    // The items of a thread lie along dim 1, in which the loop over `dims` counts groups of them; along dim 0, BLOCK apart, where
    // that is the only one. So the index is taken apart once for all of them. Where an operand is GATHERED, the others are walked
    // as one dim, whatever `dims` are: they count elements then, and lead to its.
    int64 item_stride[OPERAND_COUNT];
    uint64 items_extent;  // of the dim that items lie along
    uint64 threads;
    uint64 packets;  // along dim 0
    int32 tail;      // elements after the packets; only along a single dim
    int32 ndim;
};

#define GATHERS(k, name, T, form, held) | ((form) == GATHERED ? 1u << k : 0u)
constexpr uint32 GATHERED_ONES = 0 OPERANDS(GATHERS);

// Where the elements of a packet lie in the operands that are GATHERED: a packet begins in one row and may end in the next, whose
// place is found always, since a warp would wait for the one thread that needs it.
struct Gathered {
    int64 here[OPERAND_COUNT], next[OPERAND_COUNT];
    INDEX left;  // elements up to the end of the row

    __device__ __forceinline__ Gathered(const MapParameters& p, INDEX element) : here{}, next{}
    {
        left = (INDEX)p.dims.extent[0] - (element - p.dims.divide(element, 0) * (INDEX)p.dims.extent[0]);
        add_packet_offsets<OPERAND_COUNT, GATHERED_ONES>(p.dims, 0, p.ndim, element, p.operand, here);
        add_packet_offsets<OPERAND_COUNT, GATHERED_ONES>(p.dims, 0, p.ndim, element + left, p.operand, next);
    }
    __device__ __forceinline__ int64 offset(int k, INDEX e, STRIDE stride) const
    {
        return e < left ? advance(here[k], e, stride) : advance(next[k], e - left, stride);
    }
};

__device__ __forceinline__ void forward_tail(const MapParameters& p)
{
    OPERANDS(DECLARE_ONE)
    SCALARS(DECLARE_SCALAR)
    const int64 element = (int64)p.packets * WIDTH + threadIdx.x;
    constexpr int i = 0, e = 0;
#define LOAD_INPUT(k, name, T, form, held)                                                                                       \
    if (k > 0 && (form) == GATHERED) name[0].load_element(0, p.address[k], Gathered(p, (INDEX)element).here[k]);                 \
    else if (k > 0) { LOAD_ONE(k, name, T, form, held) }
    OPERANDS(LOAD_INPUT)
    result[0].set(0, OP::forward<A>(ARGUMENTS));
    result[0].store(p.address[0], element * p.operand[0].step, p.operand[0]);
}

extern "C" __global__ void __launch_bounds__(BLOCK) KERNEL(const __grid_constant__ MapParameters p)
{
    OPERANDS(DECLARE)
    SCALARS(DECLARE_SCALAR)
    int64 offset[OPERAND_COUNT] = {};
    INDEX thread = (INDEX)blockIdx.x * BLOCK + threadIdx.x, place;
    const bool one_dim = GATHERED_ONES != 0 || p.ndim == 1;
    if (one_dim) {
        place = (INDEX)blockIdx.x * (BLOCK * ITEMS) + threadIdx.x;
#pragma unroll
        for (int k = 0; k < OPERAND_COUNT; ++k) offset[k] = advance(0, place, p.operand[k].stride[0]);
    } else {
        place = add_packet_offsets<OPERAND_COUNT, ~0u>(p.dims, 0, p.ndim, thread, p.operand, offset) * ITEMS;
    }
    // Of the items of a thread as many exist as dim 1 still has, or, along one dim, as lie before its end.
    const INDEX left = thread >= p.threads || place >= p.items_extent ? 0 : (INDEX)p.items_extent - place;
    const INDEX apart = one_dim ? BLOCK : 1;

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i * apart >= left) continue;
#define LOAD(k, name, T, form, held) \
        if (k > 0 && (form) != GATHERED) name[i].load(p.address[k], offset[k] + i * p.item_stride[k], p.operand[k]);
        OPERANDS(LOAD)
        if constexpr (GATHERED_ONES != 0) {
            const Gathered gathered(p, (place + i * BLOCK) * WIDTH);
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
#define LOAD_ELEMENT(k, name, T, form, held) \
                if ((form) == GATHERED) name[i].load_element(e, p.address[k], gathered.offset(k, e, p.operand[k].stride[0]));
                OPERANDS(LOAD_ELEMENT)
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i * apart >= left) continue;
#define SETTLE(k, name, T, form, held) if (k > 0) name[i].settle(p.address[k], p.operand[k]);
        OPERANDS(SETTLE)
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) result[i].set(e, OP::forward<A>(ARGUMENTS));
        result[i].store(p.address[0], offset[0] + i * p.item_stride[0], p.operand[0]);
    }
    if (WIDTH > 1 && blockIdx.x == 0 && threadIdx.x < p.tail) forward_tail(p);
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
    uint64 packets;         // along dim 0
    uint32 splits;
    uint32 tiles;           // blocks along the position
    int32 tail;             // elements after the packets; only along a single dim
    int32 position_lanes;   // threads along the position, a power of two, with a ROW up to 32; the others share the loop
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
    add_offsets<OPERAND_COUNT + GRADIENT_COUNT, ~0u>(p.dims, p.loop_end, p.ndim, (I)(blockIdx.x / p.splits / p.tiles), p.operand, base);
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

// COLUMN: adds what the rows of the block have for each element of the packet.
__device__ __forceinline__ void store_columns(const SumParameters& p, int k, const A (&sum)[WIDTH], int64 place, bool exists)
{
    A(&total)[WIDTH][BLOCK] = sum_rows(sum, p.position_lanes);
    if (threadIdx.x >= p.position_lanes || !exists) return;
#pragma unroll 1  // eight times the code of a store was a third of what the kernel takes to compile
    for (int e = 0; e < WIDTH; ++e) store_sum(p, k, place + e * p.operand[OPERAND_COUNT + k].step, total[e][threadIdx.x]);
}

// ALL: adds what all threads of the block have.
__device__ __forceinline__ void store_all(const SumParameters& p, int k, const A (&sum)[WIDTH], int64 place)
{
    A own[1] = {};
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) own[0] += sum[e];
    A(&total)[1][BLOCK] = sum_rows(own, 1);
    if (threadIdx.x == 0) store_sum(p, k, place, total[0][0]);
}

// What is done with the gradients of an element.
#define TAKE(k, name, T, duties)                                              \
    if ((duties) & STORES) name.set(e, gradient[k]);                          \
    if ((duties) & SUMS) sum[k][e] += gradient[k];                            \
    if ((duties) & SUMS_ROWS) row_sum[k] += gradient[k];

__device__ __forceinline__ void backward_tail(const SumParameters& p, A (&sum)[GRADIENT_COUNT][WIDTH])
{
    OPERANDS(DECLARE_ONE)
    SCALARS(DECLARE_SCALAR)
    const int64 element = (int64)p.packets * WIDTH + threadIdx.x;
    constexpr int i = 0, e = 0;
    OPERANDS(LOAD_ONE)
    A gradient[GRADIENT_COUNT], row_sum[GRADIENT_COUNT];
    OP::backward<A>(ARGUMENTS);
#define TAKE_ONE(k, name, T, duties)                                                                                             \
    Packet<T, A, 1, GENERAL ? EITHER : PACKETS> name;                                                                         \
    TAKE(k, name, T, duties)                                                                                                     \
    if ((duties) & STORES && p.role[k] == EACH)                                                                                  \
        name.store(p.address[OPERAND_COUNT + k], element * p.operand[OPERAND_COUNT + k].step, p.operand[OPERAND_COUNT + k]);
    GRADIENTS(TAKE_ONE)
}

// Budget: 69 lines, since the macros that go over operands and gradients stand where they are used.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) KERNEL(const __grid_constant__ SumParameters p)
{
    constexpr int ENTRIES = OPERAND_COUNT + GRADIENT_COUNT;
#define MOVES_OPERAND(k, name, T, form, held) | (held ? 0u : 1u << k)
#define MOVES_GRADIENT(k, name, T, duties) | ((duties) & (STORES | SUMS_ROWS) ? 1u << (OPERAND_COUNT + k) : 0u)
    constexpr uint32 MOVES = 0 OPERANDS(MOVES_OPERAND) GRADIENTS(MOVES_GRADIENT);  // along the loop
    const int lane = threadIdx.x % p.position_lanes, row = threadIdx.x / p.position_lanes, rows = BLOCK / p.position_lanes;
    const uint32 split = blockIdx.x % p.splits, tile = blockIdx.x / p.splits % p.tiles;
    const INDEX position = (INDEX)tile * p.position_lanes + lane;
    const bool in_row = position < p.positions;

    int64 base[ENTRIES];
    block_offsets(p, position, base);

    SCALARS(DECLARE_SCALAR)
    OPERANDS(DECLARE)
#define LOAD_HELD(k, name, T, form, held)                                                                                       \
    if (held && in_row) name[0].load(p.address[k], base[k], p.operand[k]), name[0].settle(p.address[k], p.operand[k]);           \
    if (held)                                                                                                                    \
        for (int i = 1; i < ITEMS; ++i) name[i] = name[0];
    OPERANDS(LOAD_HELD)
    A sum[GRADIENT_COUNT][WIDTH] = {};
    const INDEX end = min((INDEX)p.loop, (INDEX)((split + 1) * p.loop_per_split));

    // Every thread of the block makes the same number of turns: ROW sums across a warp in each of them.
#pragma unroll 1
    for (INDEX turn = (INDEX)(split * p.loop_per_split); turn < end; turn += rows * ITEMS) {
        int64 offset[ITEMS][ENTRIES];
        bool exists[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            INDEX step = turn + i * rows + row;
            exists[i] = in_row && step < end;
            if (!exists[i]) continue;
#pragma unroll
            for (int k = 0; k < ENTRIES; ++k) offset[i][k] = base[k];
            add_packet_offsets<ENTRIES, MOVES>(p.dims, p.loop_begin, p.loop_end, step, p.operand, offset[i]);
#define LOAD(k, name, T, form, held) if (!(held)) name[i].load(p.address[k], offset[i][k], p.operand[k]);
            OPERANDS(LOAD)
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            A row_sum[GRADIENT_COUNT] = {};
            if (exists[i]) {
#define SETTLE(k, name, T, form, held) if (!(held)) name[i].settle(p.address[k], p.operand[k]);
                OPERANDS(SETTLE)
#define DECLARE_GRADIENT(k, name, T, duties) Packet<T, A, WIDTH, GENERAL ? EITHER : PACKETS> name;
                GRADIENTS(DECLARE_GRADIENT)
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    A gradient[GRADIENT_COUNT];
                    OP::backward<A>(ARGUMENTS);
                    GRADIENTS(TAKE)
                }
#define STORE(k, name, T, duties)                                                                                                \
                if ((duties) & STORES && p.role[k] == EACH)                                                                      \
                    name.store(p.address[OPERAND_COUNT + k], offset[i][OPERAND_COUNT + k], p.operand[OPERAND_COUNT + k]);
                GRADIENTS(STORE)
            }
#define STORE_ROW(k, name, T, duties)                                                                                            \
            if ((duties) & SUMS_ROWS && p.role[k] == ROW)                                                                        \
                store_row(p, k, row_sum[k], offset[i][OPERAND_COUNT + k], tile, lane == 0 && exists[i]);
            GRADIENTS(STORE_ROW)
        }
    }
    if (WIDTH > 1 && blockIdx.x == 0 && threadIdx.x < p.tail) backward_tail(p, sum);

    block_offsets(p, position, base);  // once more, rather than keep those of the sums in registers through the loop
#define FINISH(k, name, T, duties)                                                                                               \
    if ((duties) & SUMS) {                                                                                                       \
        int64 place = base[OPERAND_COUNT + k] + (int64)split * p.split_stride[k] + (int64)tile * p.tile_stride[k];               \
        if (p.role[k] == COLUMN) store_columns(p, k, sum[k], place, in_row);                                                     \
        if (p.role[k] == ALL) store_all(p, k, sum[k], place);                                                                    \
    }
    GRADIENTS(FINISH)
}

#endif
