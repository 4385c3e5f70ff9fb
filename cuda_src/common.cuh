// What every kernel stands on: storage types and their conversions, packets of neighbours, the operands of a call and where
// their elements lie, and the sum over the lanes of a block.
//
// No header is included, so NVRTC needs nothing but itself: the half headers would bring toolkit headers that a machine with
// only pip lacks, and 20-70 ms of compile time. All arithmetic is float, double or an integer; 16-bit floats are only stored.
//
// Budget: some 450 lines, in the order in which a kernel needs them; a kernel is one text, so splitting it would only add seams.
//
// The same text is built by g++ for the tests that run kernels on a CPU; CUPYFUSED_HOST marks what differs there.

typedef signed char int8;
typedef unsigned char uint8;
typedef short int16;
typedef unsigned short uint16;
typedef int int32;
typedef unsigned int uint32;
typedef long long int64;
typedef unsigned long long uint64;
typedef float float32;
typedef double float64;

struct boolean { uint8 bits; };
struct float16 { uint16 bits; };
struct bfloat16 { uint16 bits; };
struct any_dtype {};  // stored in a dtype known only when the kernel runs: see load_any

// The numbers by which a call names a dtype at run time; cupyfused/_dtypes.py holds the same list in the same order.
enum Dtype : uint32 { BOOL, UINT8, INT8, INT16, INT32, INT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };

template <typename To, typename From> __device__ __forceinline__ To bit_cast(From from)
{
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    union { From from; To to; } both;
    both.from = from;
    return both.to;
}

// ---- conversions --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float16 value)
{
#ifdef CUPYFUSED_HOST
    return (float)bit_cast<_Float16>(value.bits);
#else
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
#endif
}

__device__ __forceinline__ float to_float(bfloat16 value) { return bit_cast<float>((uint32)value.bits << 16); }

__device__ __forceinline__ float16 to_float16(float value)
{
    float16 result;
#ifdef CUPYFUSED_HOST
    result.bits = bit_cast<uint16>((_Float16)value);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#endif
    return result;
}

__device__ __forceinline__ bfloat16 to_bfloat16(float value)
{
    bfloat16 result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
    uint32 bits = bit_cast<uint32>(value);
    bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;  // rounding could carry a NaN into infinity
    bits += 0x7fffu + ((bits >> 16) & 1u);             // to nearest, ties to even
    result.bits = is_nan ? (uint16)0x7fffu : (uint16)(bits >> 16);
#endif
    return result;
}

// Two 16-bit floats share a register. Taking them out of it and rounding both into it at once is half the instructions of one by
// one, and these kernels are bound by instructions: of 8 neighbours, 8 conversions and 16 moves were a fifth of backward.
__device__ __forceinline__ float half_of(bfloat16*, uint32 pair, int half) { return bit_cast<float>(half ? pair & 0xffff0000u : pair << 16); }
__device__ __forceinline__ float half_of(float16*, uint32 pair, int half) { return to_float(float16{(uint16)(half ? pair >> 16 : pair)}); }

__device__ __forceinline__ uint32 pair_of(bfloat16*, float low, float high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return (uint32)to_bfloat16(high).bits << 16 | to_bfloat16(low).bits;
#endif
}

__device__ __forceinline__ uint32 pair_of(float16*, float low, float high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return (uint32)to_float16(high).bits << 16 | to_float16(low).bits;
#endif
}

// From a stored value to the type that the arithmetic runs in, and back: one rounding, at the end.
template <typename T> struct Convert {
    template <typename A> static __device__ __forceinline__ A load(T value) { return (A)value; }
    template <typename A> static __device__ __forceinline__ T store(A value) { return (T)value; }
};
template <> struct Convert<boolean> {
    template <typename A> static __device__ __forceinline__ A load(boolean value) { return (A)(value.bits != 0); }
    template <typename A> static __device__ __forceinline__ boolean store(A value) { return boolean{(uint8)(value != 0)}; }
};
template <> struct Convert<float16> {
    template <typename A> static __device__ __forceinline__ A load(float16 value) { return (A)to_float(value); }
    template <typename A> static __device__ __forceinline__ float16 store(A value) { return to_float16((float)value); }
};
template <> struct Convert<bfloat16> {
    template <typename A> static __device__ __forceinline__ A load(bfloat16 value) { return (A)to_float(value); }
    template <typename A> static __device__ __forceinline__ bfloat16 store(A value) { return to_bfloat16((float)value); }
};

template <typename T, typename A> __device__ __forceinline__ A load_as(const void* base, int64 offset)
{
    return Convert<T>::template load<A>(((const T*)base)[offset]);
}

// A parameter whose dtype is not the result's loads through this switch: one instance instead of one for each dtype. A function
// of its own, since inlined for each element it made a kernel take 3 s to compile instead of 0.2 s.
template <typename A> __device__ __noinline__ A load_any(const void* base, int64 offset, uint32 dtype)
{
    switch (dtype) {
    case BOOL: return load_as<boolean, A>(base, offset);
    case UINT8: return load_as<uint8, A>(base, offset);
    case INT8: return load_as<int8, A>(base, offset);
    case INT16: return load_as<int16, A>(base, offset);
    case INT32: return load_as<int32, A>(base, offset);
    case INT64: return load_as<int64, A>(base, offset);
    case FLOAT16: return load_as<float16, A>(base, offset);
    case BFLOAT16: return load_as<bfloat16, A>(base, offset);
    case FLOAT32: return load_as<float32, A>(base, offset);
    default: return load_as<float64, A>(base, offset);
    }
}

// Gradients and partial sums are floating, so only those are stored through a switch.
template <typename A> __device__ __noinline__ void store_any(void* base, int64 offset, uint32 dtype, A value)
{
    switch (dtype) {
    case FLOAT16: ((float16*)base)[offset] = Convert<float16>::store(value); break;
    case BFLOAT16: ((bfloat16*)base)[offset] = Convert<bfloat16>::store(value); break;
    case FLOAT32: ((float32*)base)[offset] = (float32)value; break;
    default: ((float64*)base)[offset] = (float64)value; break;
    }
}

// ---- arithmetic that functors share -------------------------------------------------------------------------------------

// a * b + c: one fused operation for floats; integers wrap as torch's do, so they are computed unsigned and cut to their size.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return a * b + c; }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return a * b + c; }
template <typename T> __device__ __forceinline__ T multiply_add(T a, T b, T c) { return (T)((uint64)a * (uint64)b + (uint64)c); }

// A number that the caller may leave out.
template <typename T> struct Optional { T value; bool present; };

__device__ __forceinline__ float infinity(float*) { return bit_cast<float>(0x7f800000u); }
__device__ __forceinline__ double infinity(double*) { return bit_cast<double>(0x7ff0000000000000ull); }

// The larger and the smaller of two, NaN if either is: fmaxf and fminf would drop it. One instruction from sm_80 on.
template <typename T> __device__ __forceinline__ T maximum(T a, T b) { return a != a || a > b ? a : b; }
template <typename T> __device__ __forceinline__ T minimum(T a, T b) { return a != a || a < b ? a : b; }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ __forceinline__ float maximum(float a, float b)
{
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float minimum(float a, float b)
{
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
#endif

// torch.clamp: NaN passes through, a NaN bound gives NaN, and max_val wins over min_val.
template <typename T> __device__ __forceinline__ T clamp(T value, Optional<T> min_val, Optional<T> max_val)
{
    if (min_val.present) value = maximum(value, min_val.value);
    if (max_val.present) value = minimum(value, max_val.value);
    return value;
}

// ---- operands -----------------------------------------------------------------------------------------------------------

enum Access : uint32 {
    ABSENT,  // left out, or not needed for the gradients that are asked for
    NUMBER,
    ARRAY,   // one element for the whole packet: dim 0 is broadcast, or packets are single elements
    VECTOR,  // a packet's elements are neighbours, aligned for a load of all of them at once unless they are SHIFTED
};

// What an instance of a kernel is compiled to do with an operand and with a gradient. The fewer, the faster and the shorter: an
// instance is made for just what its call needs, but for the GENERAL one, which keeps all of it open for what is rare.
enum Form {
    PACKETS,  // an array whose packets are loaded whole
    SHIFTED,  // the same, but they begin anywhere: two neighbours are loaded and shifted together
    SPREAD,   // the same, or an array whose dim 0 is broadcast (the gradient of a sum, say)
    UNIFORM,  // one value for a packet: a number, or an array whose dim 0 is broadcast
    GATHERED, // an array whose elements for a packet may lie anywhere
    EITHER,   // packets are single elements: a number or an array
};
enum Duty { STORES = 1, SUMS = 2, SUMS_ROWS = 4 };

// One tensor of a call. Words, not bytes: an instruction takes a word of the parameters as its operand, and a byte waits for a load.
struct Operand {
    uint32 access;
    uint32 dtype;
    int32 step;  // between the elements of a packet, 1 or 0; not used where packets are single elements
};

// A number, or an array without dims.
struct Scalar {
    uint32 access;
    uint32 dtype;
};

// A number of the call, as the host packed it into 8 bytes.
__device__ __forceinline__ float number_as(float*, uint64 bits) { return bit_cast<float>((uint32)bits); }
__device__ __forceinline__ double number_as(double*, uint64 bits) { return bit_cast<double>(bits); }
template <typename T> __device__ __forceinline__ T number_as(T*, uint64 bits) { return (T)bits; }

template <typename A> __device__ __forceinline__ A load_scalar(uint64 address, const Scalar& scalar)
{
    return scalar.access >= ARRAY ? load_any<A>((const void*)address, 0, scalar.dtype) : number_as((A*)0, address);
}

template <int BYTES> struct Word;
template <> struct Word<1> { typedef uint8 type; };
template <> struct Word<2> { typedef uint16 type; };
template <> struct Word<4> { typedef uint32 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

template <typename T> struct IsHalf { static constexpr bool value = false; };
template <> struct IsHalf<float16> { static constexpr bool value = true; };
template <> struct IsHalf<bfloat16> { static constexpr bool value = true; };

// What one thread takes at once: W neighbours along dim 0, kept as they are stored until every load of the thread is under way,
// so that no conversion waits.
template <typename T, typename A, int W, Form FORM> struct Packet {
    typedef typename Word<sizeof(T) * W>::type Whole;
    union { Whole whole; T value[W]; uint32 pair[(W + 1) / 2]; };
    A uniform, computed[W];
    Whole after;   // SHIFTED: what comes after the aligned bytes in which the packet begins,
    uint32 begin;  // and where in those it begins

    __device__ __forceinline__ void load(uint64 address, int64 offset, const Operand& operand)
    {
        if (FORM != PACKETS && FORM != SHIFTED && operand.access < ARRAY) return;
        const T* base = (const T*)address + offset;
        if constexpr (FORM == SHIFTED && W > 1) load_around((uint64)base);
        else if (W == 1 || FORM == UNIFORM || (FORM == SPREAD && operand.access == ARRAY)) value[0] = *base;
        else whole = *(const Whole*)base;
    }
    // Each of the two holds some of the packet, so no memory is touched that lies 16 bytes or more from the array.
    __device__ __forceinline__ void load_around(uint64 first)
    {
        begin = first % sizeof(Whole);
#ifdef CUPYFUSED_HOST  // exactly the packet, for AddressSanitizer
        memcpy((char*)&whole + begin, (const void*)first, sizeof(Whole) - begin);
        memcpy(&after, (const char*)first + sizeof(Whole) - begin, begin);
#else
        whole = *(const Whole*)(first - begin);
        if (begin > 0) after = *(const Whole*)(first - begin + sizeof(Whole));
#endif
    }
    __device__ __forceinline__ void shift_together()
    {
        constexpr int WORDS = sizeof(Whole) / 4;
        union { Whole both[2]; uint32 word[2 * WORDS]; } from;
        from.both[0] = whole, from.both[1] = after;
#pragma unroll
        for (int words = WORDS / 2; words > 0; words /= 2)
#pragma unroll
            for (int k = 0; k + words < 2 * WORDS; ++k)
                if (begin / 4 & words) from.word[k] = from.word[k + words];
        union { Whole whole; uint32 word[WORDS]; } to;
#pragma unroll
        for (int k = 0; k < WORDS; ++k)
            to.word[k] = sizeof(T) >= 4 ? from.word[k] : (uint32)(((uint64)from.word[k + 1] << 32 | from.word[k]) >> begin % 4 * 8);
        whole = to.whole;
    }
    __device__ __forceinline__ void load_element(int e, uint64 address, int64 offset) { value[e] = ((const T*)address)[offset]; }
    // Once all loads are under way: gives each element of the packet its value.
    __device__ __forceinline__ void settle(uint64 bits, const Operand& operand)
    {
        if constexpr (FORM == SHIFTED && W > 1) shift_together();
        if (FORM == UNIFORM || FORM == EITHER)
            uniform = operand.access < ARRAY ? number_as((A*)0, bits) : Convert<T>::template load<A>(value[0]);
        else if (FORM == SPREAD && operand.access == ARRAY)
#pragma unroll
            for (int e = 1; e < W; ++e) value[e] = value[0];
    }
    __device__ __forceinline__ A get(int e) const
    {
        if constexpr (FORM == UNIFORM || FORM == EITHER) return uniform;
        else if constexpr (IsHalf<T>::value && W > 1) return half_of((T*)0, pair[e / 2], e % 2);
        else return Convert<T>::template load<A>(value[e]);
    }
    __device__ __forceinline__ void set(int e, A result) { computed[e] = result; }
    __device__ __forceinline__ void store(uint64 address, int64 offset, const Operand&)
    {
        if constexpr (IsHalf<T>::value && W > 1)
#pragma unroll
            for (int e = 0; e < W; e += 2) pair[e / 2] = pair_of((T*)0, computed[e], computed[e + 1]);
        else
#pragma unroll
            for (int e = 0; e < W; ++e) value[e] = Convert<T>::store(computed[e]);
        *(Whole*)((T*)address + offset) = whole;
    }
};

template <typename A> struct Packet<any_dtype, A, 1, EITHER> {
    A value;

    __device__ __forceinline__ void load_element(int, uint64, int64) {}
    __device__ __forceinline__ void load(uint64 address, int64 offset, const Operand& operand)
    {
        if (operand.access >= ARRAY) value = load_any<A>((const void*)address, offset, operand.dtype);
    }
    __device__ __forceinline__ void settle(uint64 bits, const Operand& operand)
    {
        if (operand.access < ARRAY) value = number_as((A*)0, bits);
    }
    __device__ __forceinline__ A get(int) const { return value; }
    __device__ __forceinline__ void set(int, A result) { value = result; }
    __device__ __forceinline__ void store(uint64 address, int64 offset, const Operand& operand) const
    {
        store_any<A>((void*)address, offset, operand.dtype, value);
    }
};

// ---- where an element lies ----------------------------------------------------------------------------------------------

// Multiply and shift in place of a division, for indices below 2^31.
struct Divider {
    uint32 magic, shift;

    __device__ __forceinline__ uint32 divide(uint32 index) const { return (uint32)(((uint64)index * magic) >> shift); }
};

// One of the collapsed dims that a kernel loops over, innermost first, with all that is asked along it side by side: a kernel that
// is over in a microsecond waits for each cache line of its parameters. `stride` is in elements, of each tensor; along dim 0 it
// leads from packet to packet. STRIDE is int32 wherever that holds them all, even of tensors beyond 2^31 elements: an index times a
// stride is then one instruction with a 64-bit result.
template <int TENSORS> struct Dim {
    INDEX extent;
    Divider divider;
    STRIDE stride[TENSORS];

    __device__ __forceinline__ uint32 divide(uint32 index) const { return divider.divide(index); }
    __device__ __forceinline__ uint64 divide(uint64 index) const { return index / extent; }
};

// offset + place * stride. In one instruction with 32-bit factors, where the compiler on its own takes up to six.
__device__ __forceinline__ int64 advance(int64 offset, uint32 place, int32 stride)
{
#ifdef CUPYFUSED_HOST
    return offset + (int64)place * stride;
#else
    asm("mad.wide.s32 %0, %1, %2, %0;" : "+l"(offset) : "r"(place), "r"(stride));
    return offset;
#endif
}
__device__ __forceinline__ int64 advance(int64 offset, uint64 place, int64 stride) { return offset + (int64)place * stride; }

// Adds to each tensor's offset what `index`, counted over `ndim` dims, is away. MOVES has a bit for each tensor whose offset is
// asked for. Returns the place along dim 1.
//
// UNROLLED dims stand one after the other and a call leaves after its last: most have one to three, and a loop costs as much as
// what is in it. One straight line, since a jump far ahead waits for the instructions there: 0.1 of the 1.3 us of a small call.
// The general instance, with a loop alone, takes less time to compile.
constexpr int UNROLLED_DIMS = GENERAL ? 0 : 3;
template <uint32 MOVES, int UNROLLED = 0, int TENSORS>
__device__ __forceinline__ INDEX add_offsets(const Dim<TENSORS>* dim, int ndim, INDEX index, int64* offset)
{
    INDEX second = 0;
    auto add = [&](int d) {
        INDEX rest = d + 1 == ndim ? 0 : dim[d].divide(index);
        INDEX place = index - rest * dim[d].extent;
#pragma unroll
        for (int k = 0; k < TENSORS; ++k)
            if (MOVES >> k & 1) offset[k] = advance(offset[k], place, dim[d].stride[k]);
        if (d == 1) second = place;
        index = rest;
    };
#pragma unroll
    for (int d = 0; d < UNROLLED; ++d) {
        if (d > 0 && d >= ndim) return second;  // without dims the index is 0, and so is what it adds
        add(d);
    }
#pragma unroll 1
    for (int d = UNROLLED; d < ndim; ++d) add(d);
    return second;
}

// The same where it is done for each packet: without what one dim does not need, 3 % where instructions are the limit.
template <uint32 MOVES, int TENSORS>
__device__ __forceinline__ void add_packet_offsets(const Dim<TENSORS>* dim, int ndim, INDEX index, int64* offset)
{
    if (GENERAL || ndim != 1) {
        add_offsets<MOVES, UNROLLED_DIMS>(dim, ndim, index, offset);
        return;
    }
#pragma unroll
    for (int k = 0; k < TENSORS; ++k)
        if (MOVES >> k & 1) offset[k] = advance(offset[k], index, dim[0].stride[k]);
}

// ---- sums ---------------------------------------------------------------------------------------------------------------

// Sum W values each over the threads of a block that share their place among 2^column_bits columns, the same pairs every time, and
// have the sums stored, by store(e, sum) in a thread of that column. First inside each warp, then over the warps.
template <typename A, int W, typename Store> __device__ __forceinline__ void sum_rows(A (&value)[W], int column_bits, Store store)
{
    __shared__ A sums[W][BLOCK];
    const int thread = threadIdx.x, columns = 1 << column_bits;
#pragma unroll 1
    for (int distance = 16; distance >= columns; distance /= 2)
#pragma unroll
        for (int e = 0; e < W; ++e) value[e] += __shfl_xor_sync(0xffffffffu, value[e], distance);
    __syncthreads();  // sums of another gradient may still be read
#pragma unroll
    for (int e = 0; e < W; ++e) sums[e][thread] = value[e];
    __syncthreads();
#pragma unroll 1
    for (int k = thread; k < W << column_bits; k += BLOCK) {
        const int e = k >> column_bits;
        A total = 0;
        for (int first = 0; first < BLOCK; first += columns > 32 ? columns : 32) total += sums[e][first + (k & (columns - 1))];
        store(e, total);
    }
}

// Sum over `lanes` neighbours of a warp (a power of two up to 32); every one of them has the result.
template <typename A> __device__ __forceinline__ A sum_lanes(A value, int lanes)
{
    if (lanes == 32)
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    else
#pragma unroll 1
        for (int distance = lanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}
