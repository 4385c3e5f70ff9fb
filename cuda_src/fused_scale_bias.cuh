// fused_scale_bias: y = x * scale + bias
//
// x, scale, bias: any shapes that broadcast together; y has the broadcast shape.
//
//   grad_x = grad_out * scale      grad_scale = grad_out * x      grad_bias = grad_out
//
// each then summed down to its input's shape. Backward needs scale for grad_x, x for grad_scale, nothing for grad_bias.

struct fused_scale_bias {
    template <typename T> static __device__ __forceinline__ T forward(T x, T scale, T bias) { return multiply_add(x, scale, bias); }

    template <typename T>
    static __device__ __forceinline__ void backward(T grad_out, T x, T scale, T, T& grad_x, T& grad_scale, T& grad_bias)
    {
        grad_x = grad_out * scale;
        grad_scale = grad_out * x;
        grad_bias = grad_out;
    }
};
