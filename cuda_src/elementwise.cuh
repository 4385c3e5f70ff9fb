// The two kernels of an elementwise op: the map, and the map of its backward, which also sums gradients.
//
// Budget: some 360 lines; the two share the macros over operands and what a packet is, which two files would each have to say.
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
// A thread takes ITEMS packets of WIDTH neighbours: 16 bytes each where the layout allows it, else as many single elements, apart
// so that the threads of a warp stay side by side. All loads are issued before the first use. Packets are whole; the elements
// beyond the last of them, of one dim or of rows that are walked as one, go one to a thread.

typedef ARITHMETIC A;

#define ELEMENT_OF(name) name[i].get(e)
#define DECLARE(k, name, T, form, held) Packet<T, A, WIDTH, form> name[ITEMS];
#define DECLARE_ONE(k, name, T, form, held) Packet<T, A, 1, form> name[1];
#define DECLARE_SCALAR(k, name) \
    const Optional<A> name = {load_scalar<A>(p.scalar_address[k], p.scalar[k]), p.scalar[k].access != ABSENT};
#define GATHERS(k, name, T, form, held) | ((form) == GATHERED ? 1u << k : 0u)
constexpr uint32 GATHERED_ONES = 0 OPERANDS(GATHERS);

// Where the elements of a packet lie in the operands that are GATHERED: a packet begins in one row and may end in the next, whose
// place is found always, since a warp would wait for the one thread that needs it.
template <int TENSORS> struct Gathered {
    int64 here[TENSORS], next[TENSORS];
    INDEX left;  // elements up to the end of the row
    const Dim<TENSORS>& inner;

    __device__ __forceinline__ Gathered(const Dim<TENSORS>* dim, int ndim, INDEX element) : here{}, next{}, inner(dim[0])
    {
        left = inner.extent - (element - inner.divide(element) * inner.extent);
        add_offsets<GATHERED_ONES, UNROLLED_DIMS>(dim, ndim, element, here);
        add_offsets<GATHERED_ONES, UNROLLED_DIMS>(dim, ndim, element + left, next);
    }
    __device__ __forceinline__ int64 offset(int k, INDEX e) const
    {
        return e < left ? advance(here[k], e, inner.stride[k]) : advance(next[k], e - left, inner.stride[k]);
    }
};

// One packet for all items of a thread.
#define LOAD_GATHERED(k, name, T, form, held)                                                                                    \
    if constexpr ((form) == GATHERED) {                                                                                          \
        _Pragma("unroll") for (int e = 0; e < WIDTH; ++e) name[0].load_element(e, p.address[k], gathered.offset(k, e));          \
        _Pragma("unroll") for (int i = 1; i < ITEMS; ++i) name[i] = name[0];                                                     \
    }

// Of an element after the last packet.
#define LOAD_ONE(k, name, T, form, held)                                                                                         \
    if ((form) == GATHERED) name[0].load_element(0, p.address[k], gathered_offset(p, k, element));                               \
    else if (k >= FIRST_READ) name[0].load(p.address[k], element * p.operand[k].step, p.operand[k]);                             \
    if (k >= FIRST_READ) name[0].settle(p.address[k], p.operand[k]);

#ifdef FORWARD

constexpr int FIRST_READ = 1;  // operand 0 is the result

// Operand 0 is y, the inputs follow. An address is a number's bits where the operand is a number.
struct MapParameters {
    uint64 address[OPERAND_COUNT];
    uint64 scalar_address[SCALAR_COUNT + 1];  // one more than there are: an array needs an element
    INDEX threads;
    INDEX packets;       // along dim 0; with GATHERED operands, along all dims
    INDEX items_extent;  // of the dim that items lie along
    int32 tail;          // elements after the packets, of a single dim or of all walked as one
    int32 ndim;
    Operand operand[OPERAND_COUNT];
    Scalar scalar[SCALAR_COUNT + 1];
    Dim<OPERAND_COUNT> dim[MAX_DIMS];
    // The items of a thread lie along dim 1, in which the loop over `dim` counts groups of them; along dim 0, BLOCK apart, where
    // that is the only one. So the index is taken apart once for all of them. Where an operand is GATHERED, the others are walked
    // as one dim, whatever `dim` says: it counts elements then, and leads to the gathered ones. These repeat after a period, which
    // is what the items lie apart, so that they share what was gathered.
    int64 item_stride[OPERAND_COUNT];
    INDEX period;
    Divider period_divider;
};

__device__ __forceinline__ int64 gathered_offset(const MapParameters& p, int k, int64 element)
{
    return Gathered<OPERAND_COUNT>(p.dim, p.ndim, (INDEX)element).here[k];
}

__device__ __forceinline__ void forward_tail(const MapParameters& p)
{
    OPERANDS(DECLARE_ONE)
    SCALARS(DECLARE_SCALAR)
    const int64 element = (int64)p.packets * WIDTH + threadIdx.x;
    constexpr int i = 0, e = 0;
    OPERANDS(LOAD_ONE)
    result[0].set(0, OP::forward<A>(ARGUMENTS));
    result[0].store(p.address[0], element * p.operand[0].step, p.operand[0]);
}

extern "C" __global__ void __launch_bounds__(BLOCK) KERNEL(const __grid_constant__ MapParameters p)
{
    OPERANDS(DECLARE)
    int64 offset[OPERAND_COUNT] = {};
    const INDEX thread = (INDEX)blockIdx.x * BLOCK + threadIdx.x;
    const bool one_dim = GATHERED_ONES != 0 || p.ndim == 1;
    const INDEX apart = GATHERED_ONES != 0 ? p.period : one_dim ? BLOCK : 1;
    INDEX place;
    if constexpr (GATHERED_ONES != 0) {
        place = thread + p.period_divider.divide(thread) * p.period * (ITEMS - 1);
#pragma unroll
        for (int k = 0; k < OPERAND_COUNT; ++k) offset[k] = advance(0, place, p.dim[0].stride[k]);
    } else {
        place = (INDEX)blockIdx.x * (BLOCK * ITEMS) + threadIdx.x;
        const INDEX second = add_offsets<~0u, UNROLLED_DIMS>(p.dim, p.ndim, one_dim ? place : thread, offset);
        if (!one_dim) place = second * ITEMS;
    }
    // Of the items of a thread as many exist as dim 1 still has, or, along one dim, as lie before its end.
    const INDEX left = thread >= p.threads || place >= p.items_extent ? 0 : p.items_extent - place;

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i * apart >= left) continue;
#define LOAD(k, name, T, form, held) \
        if (k > 0 && (form) != GATHERED) name[i].load(p.address[k], offset[k] + i * p.item_stride[k], p.operand[k]);
        OPERANDS(LOAD)
    }
    if (GATHERED_ONES != 0 && left > 0) {
        const Gathered<OPERAND_COUNT> gathered(p.dim, p.ndim, place * WIDTH);
        OPERANDS(LOAD_GATHERED)
    }
    SCALARS(DECLARE_SCALAR)  // here, since loading one waits
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
enum Role : uint32 {
    UNWANTED,
    EACH,     // of full size: stored as it comes
    COLUMN,   // keeps the position: a sum over the loop for each element of the packet
    ALL,      // a sum over the loop and over the positions of the block
    ROW,      // keeps the loop, sums over the positions: one store for each step and tile
};
// The sums of one block go to the gradient itself if nothing is left to add, else to a workspace that sum_partials finishes.

constexpr int FIRST_READ = 0;  // operand 0 is grad_out
constexpr int ENTRIES = OPERAND_COUNT + GRADIENT_COUNT;

// Operand 0 is grad_out, the inputs follow, then the gradients.
struct SumParameters {
    uint64 address[ENTRIES];
    uint64 scalar_address[SCALAR_COUNT + 1];
    INDEX loop;            // indices of the loop dims together
    INDEX loop_per_split;
    INDEX positions;       // packets along dim 0 if that is the position, else 1
    INDEX packets;         // along dim 0; with GATHERED operands, along all dims
    INDEX tail_position;   // of the thread that takes the tail
    int32 tail;            // elements after the packets, of a single dim or of all walked as one
    uint32 tiles;          // blocks along the position
    Divider tile_divider;
    int32 lane_bits;       // 2^lane_bits threads lie along the position, with a ROW up to 32; the others share the loop
    int32 loop_begin;      // 1 with a position dim, else 0
    int32 loop_end;
    int32 ndim;
    int32 gathered_ndim;   // dims after those, which lead from an element of the position to those that are GATHERED
    Role role[GRADIENT_COUNT];
    Operand operand[ENTRIES];
    Scalar scalar[SCALAR_COUNT + 1];
    int64 split_stride[GRADIENT_COUNT];
    int64 tile_stride[GRADIENT_COUNT];
    Dim<ENTRIES> dim[MAX_DIMS];
};

__device__ __forceinline__ int64 gathered_offset(const SumParameters& p, int k, int64 element)
{
    const INDEX place = p.tail_position * WIDTH + (INDEX)(element - (int64)p.packets * WIDTH);  // in the period
    return Gathered<ENTRIES>(p.dim + p.ndim, p.gathered_ndim, place).here[k];
}

// A block is for one split of the loop (y), and one tile of the position and one index of the grid dims (x).
struct Block {
    uint32 split, tile, index;

    __device__ __forceinline__ Block(const SumParameters& p) : split(blockIdx.y), index(p.tile_divider.divide(blockIdx.x))
    {
        tile = blockIdx.x - index * p.tiles;
    }
};

// Where each tensor begins for a block, and for a thread's position.
__device__ __forceinline__ void block_offsets(const SumParameters& p, const Block& block, INDEX position, int64 (&base)[ENTRIES])
{
#pragma unroll
    for (int k = 0; k < ENTRIES; ++k) base[k] = p.loop_begin ? advance(0, position, p.dim[0].stride[k]) : 0;
    add_offsets<~0u>(p.dim + p.loop_end, p.ndim - p.loop_end, block.index, base);
}

__device__ __forceinline__ void store_sum(const SumParameters& p, int k, int64 offset, A value)
{
    if (p.operand[OPERAND_COUNT + k].dtype == (sizeof(A) == 4 ? FLOAT32 : FLOAT64)) ((A*)p.address[OPERAND_COUNT + k])[offset] = value;
    else store_any<A>((void*)p.address[OPERAND_COUNT + k], offset, p.operand[OPERAND_COUNT + k].dtype, value);
}

// ROW: adds what the lanes of one step have.
__device__ __forceinline__ void store_row(const SumParameters& p, int k, A value, int64 offset, uint32 tile, bool stores)
{
    A total = sum_lanes(value, 1 << p.lane_bits);
    if (stores) store_sum(p, k, offset + tile * p.tile_stride[k], total);
}

// COLUMN: adds what the rows of the block have for each element of the packet.
__device__ __forceinline__ void store_columns(const SumParameters& p, int k, A (&sum)[WIDTH], int64 place, bool exists)
{
    sum_rows(sum, p.lane_bits, [&](int e, A total) {
        if (exists) store_sum(p, k, place + e * p.operand[OPERAND_COUNT + k].step, total);
    });
}

// ALL: adds what all threads of the block have.
__device__ __forceinline__ void store_all(const SumParameters& p, int k, const A (&sum)[WIDTH], int64 place)
{
    A own[1] = {};
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) own[0] += sum[e];
    sum_rows(own, 0, [&](int, A total) { store_sum(p, k, place, total); });
}

// What is done with the gradients of an element.
#define TAKE(k, name, T, duties)                                              \
    if ((duties) & STORES) name.set(e, gradient[k]);                          \
    if ((duties) & SUMS) sum[k][e] += gradient[k];                            \
    if ((duties) & SUMS_ROWS) row_sum[k] += gradient[k];

// What is left after the last whole packet, by the threads that have its position, one element each.
__device__ __forceinline__ void backward_tail(const SumParameters& p, int place, A (&sum)[GRADIENT_COUNT][WIDTH])
{
    OPERANDS(DECLARE_ONE)
    SCALARS(DECLARE_SCALAR)
    const int64 element = (int64)p.packets * WIDTH + place;
    constexpr int i = 0, e = 0;
    OPERANDS(LOAD_ONE)
    A gradient[GRADIENT_COUNT], row_sum[GRADIENT_COUNT] = {};
    OP::backward<A>(ARGUMENTS);
#define TAKE_ONE(k, name, T, duties)                                                                                             \
    Packet<T, A, 1, GENERAL ? EITHER : PACKETS> name;                                                                            \
    TAKE(k, name, T, (duties) & ~SUMS)                                                                                           \
    if ((duties) & STORES && p.role[k] == EACH)                                                                                  \
        name.store(p.address[OPERAND_COUNT + k], element * p.operand[OPERAND_COUNT + k].step, p.operand[OPERAND_COUNT + k]);     \
    _Pragma("unroll") for (int own = 0; own < WIDTH; ++own)                                                                      \
        if ((duties) & SUMS && own == place) sum[k][own] += gradient[k];
    GRADIENTS(TAKE_ONE)
}

// What the kernel does with each operand and each gradient, in this order.
#define MOVES_OPERAND(k, name, T, form, held) | (held ? 0u : 1u << k)
#define MOVES_GRADIENT(k, name, T, duties) | ((duties) & (STORES | SUMS_ROWS) ? 1u << (OPERAND_COUNT + k) : 0u)
#define LOAD_HELD(k, name, T, form, held) if (held && (form) != GATHERED && in_row) name[0].load(p.address[k], base[k], p.operand[k]);
#define LOAD(k, name, T, form, held) if (!(held)) name[i].load(p.address[k], offset[i][k], p.operand[k]);
#define SETTLE_HELD(k, name, T, form, held)                                                                                      \
    if (held) name[0].settle(p.address[k], p.operand[k]);                                                                        \
    if (held)                                                                                                                    \
        for (int i = 1; i < ITEMS; ++i) name[i] = name[0];
#define SETTLE(k, name, T, form, held) if (!(held)) name[i].settle(p.address[k], p.operand[k]);
#define DECLARE_GRADIENT(k, name, T, duties) Packet<T, A, WIDTH, GENERAL ? EITHER : PACKETS> name;
#define STORE(k, name, T, duties)                                                                                                \
    if ((duties) & STORES && p.role[k] == EACH)                                                                                  \
        name.store(p.address[OPERAND_COUNT + k], offset[i][OPERAND_COUNT + k], p.operand[OPERAND_COUNT + k]);
#define STORE_ROW(k, name, T, duties)                                                                                            \
    if ((duties) & SUMS_ROWS && p.role[k] == ROW)                                                                                \
        store_row(p, k, row_sum[k], offset[i][OPERAND_COUNT + k], block.tile, lane == 0 && exists[i]);
#define FINISH(k, name, T, duties)                                                                                               \
    if ((duties) & SUMS) {                                                                                                       \
        int64 place = base[OPERAND_COUNT + k] + block.split * p.split_stride[k] + block.tile * p.tile_stride[k];                 \
        if (p.role[k] == COLUMN) store_columns(p, k, sum[k], place, in_row);                                                     \
        if (p.role[k] == ALL) store_all(p, k, sum[k], place);                                                                    \
    }

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) KERNEL(const __grid_constant__ SumParameters p)
{
    constexpr uint32 MOVES = 0 OPERANDS(MOVES_OPERAND) GRADIENTS(MOVES_GRADIENT);  // along the loop
    const int lane = threadIdx.x & ((1 << p.lane_bits) - 1), row = threadIdx.x >> p.lane_bits, rows = BLOCK >> p.lane_bits;
    const Block block(p);
    const INDEX position = ((INDEX)block.tile << p.lane_bits) + lane;
    const bool in_row = position < p.positions;

    int64 base[ENTRIES];
    block_offsets(p, block, position, base);
    OPERANDS(DECLARE)
    OPERANDS(LOAD_HELD)
    if constexpr (GATHERED_ONES != 0) {
        const Gathered<ENTRIES> gathered(p.dim + p.ndim, p.gathered_ndim, in_row ? position * WIDTH : 0);
        OPERANDS(LOAD_GATHERED)
    }
    SCALARS(DECLARE_SCALAR)
    A sum[GRADIENT_COUNT][WIDTH] = {};
    const INDEX begin = block.split * p.loop_per_split, end = min(p.loop, begin + p.loop_per_split);

    // Every thread of the block makes the same number of turns: ROW sums across a warp in each of them.
#pragma unroll 1
    for (INDEX turn = begin; turn < end; turn += rows * ITEMS) {
        int64 offset[ITEMS][ENTRIES];
        bool exists[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            INDEX step = turn + i * rows + row;
            exists[i] = in_row && step < end && (GATHERED_ONES == 0 || step * p.positions + position < p.packets);
            if (!exists[i]) continue;
#pragma unroll
            for (int k = 0; k < ENTRIES; ++k) offset[i][k] = base[k];
            add_packet_offsets<MOVES>(p.dim + p.loop_begin, p.loop_end - p.loop_begin, step, offset[i]);
            OPERANDS(LOAD)
        }
        if (turn == begin) {  // after the first loads, so that none waits for what is held
            OPERANDS(SETTLE_HELD)
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            A row_sum[GRADIENT_COUNT] = {};
            if (exists[i]) {
                OPERANDS(SETTLE)
                GRADIENTS(DECLARE_GRADIENT)
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    A gradient[GRADIENT_COUNT];
                    OP::backward<A>(ARGUMENTS);
                    GRADIENTS(TAKE)
                }
                GRADIENTS(STORE)
            }
            GRADIENTS(STORE_ROW)
        }
    }
    if (WIDTH > 1 && block.split == 0 && position == p.tail_position)
        for (int place = row; place < p.tail; place += rows) backward_tail(p, place, sum);

    block_offsets(p, block, position, base);  // once more, rather than keep those of the sums in registers through the loop
    GRADIENTS(FINISH)
}

#endif
