// The second step of a gradient's sum: grad[k] = sum over r of partial[k, r], for up to three gradients in one launch.
//
// k counts what the gradient keeps and r what is left to add, both over dims of the workspace. BLOCK threads take `columns`
// kept elements and share the partial sums among BLOCK / columns rows, always in the same order, so the result repeats bit for bit.

typedef ARITHMETIC A;

struct Partials {
    uint64 kept;
    uint64 reduced;
    Dims kept_dims;
    Dims reduced_dims;
    Operand kept_operand[2];  // 0: in the workspace, 1: in the gradient
    Operand reduced_operand;
    int32 kept_ndim;
    int32 reduced_ndim;
    int32 columns;
};

struct PartialsParameters {
    uint64 address[GRADIENT_COUNT][2];  // of the workspace and of the gradient
    Partials gradient[GRADIENT_COUNT];
};

extern "C" __global__ void __launch_bounds__(BLOCK) KERNEL(const __grid_constant__ PartialsParameters p)
{
    const Partials& g = p.gradient[blockIdx.y];
    INDEX kept = (INDEX)blockIdx.x * g.columns + threadIdx.x % g.columns;
    int64 place[2] = {0, 0};
    add_offsets<2, 3>(g.kept_dims, 0, g.kept_ndim, kept, g.kept_operand, place);

    A sum[1] = {};
    if (kept < g.kept) {
        for (INDEX r = threadIdx.x / g.columns; r < g.reduced; r += BLOCK / g.columns) {
            int64 offset = place[0];
            add_offsets<1, 1>(g.reduced_dims, 0, g.reduced_ndim, r, &g.reduced_operand, &offset);
            sum[0] += ((const A*)p.address[blockIdx.y][0])[offset];
        }
    }
    A(&total)[1][BLOCK] = sum_rows(sum, g.columns);
    if (threadIdx.x < g.columns && kept < g.kept)
        store_any<A>((void*)p.address[blockIdx.y][1], place[1], g.kept_operand[1].dtype, total[0][threadIdx.x]);
}
