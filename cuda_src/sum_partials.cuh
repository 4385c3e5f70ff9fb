// The second step of a gradient's sum: grad[k] = sum over r of partial[k, r], for up to three gradients in one launch.
//
// k counts what the gradient keeps and r what is left to add. BLOCK threads take 2^column_bits kept elements and share the partial
// sums among the rows that are left, always in the same order, so the result repeats bit for bit.

typedef ARITHMETIC A;

struct Partials {
    INDEX kept;
    INDEX reduced;
    // Where partial sum r of kept element k lies: (r / inner * kept + k) * inner + r % inner.
    INDEX inner;
    Divider inner_divider;
    int32 column_bits;
    int32 ndim;
    uint32 dtype;  // of the gradient
    Dim<1> dim[MAX_DIMS];
};

struct PartialsParameters {
    uint64 address[GRADIENT_COUNT][2];  // of the workspace and of the gradient
    Partials gradient[GRADIENT_COUNT];
};

extern "C" __global__ void __launch_bounds__(BLOCK) KERNEL(const __grid_constant__ PartialsParameters p)
{
    const Partials& g = p.gradient[blockIdx.y];
    const A* partial = (const A*)p.address[blockIdx.y][0];
    const INDEX k = ((INDEX)blockIdx.x << g.column_bits) + (threadIdx.x & ((1 << g.column_bits) - 1)), row = threadIdx.x >> g.column_bits;
    const INDEX rows = BLOCK >> g.column_bits;

    A sum[1] = {};
    if (k < g.kept && g.inner == 1)
#pragma unroll 8  // so that as many loads are under way: the launch is over in a few times what one takes
        for (INDEX r = row; r < g.reduced; r += rows) sum[0] += partial[(int64)r * g.kept + k];
    else if (k < g.kept)
#pragma unroll 8
        for (INDEX r = row; r < g.reduced; r += rows) {
            INDEX outer = g.inner_divider.divide(r);
            sum[0] += partial[((int64)outer * g.kept + k) * g.inner + (r - outer * g.inner)];
        }
    sum_rows(sum, g.column_bits, [&](int, A total) {
        if (k >= g.kept) return;
        int64 place = 0;
        add_offsets<1>(g.dim, g.ndim, k, &place);
        store_any<A>((void*)p.address[blockIdx.y][1], place, g.dtype, total);
    });
}
