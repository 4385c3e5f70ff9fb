// fused_scale_bias_clamp: y = clamp(v, min_val, max_val), v = x * scale + bias
//
// x, scale, bias: any shapes that broadcast together; y has the broadcast shape. min_val, max_val: one number each, or absent.
//
//   g = grad_out where v is inside the bounds, else 0
//   grad_x = g * scale             grad_scale = g * x             grad_bias = g
//
// each then summed down to its input's shape. Backward needs x, scale and bias: v is computed again rather than kept, which
// costs no memory traffic (x and scale are read anyway) and saves a tensor of full size.
//
// What the gradient is worth where v touches a bound differs between PyTorch releases and between bounds given as numbers and
// as tensors; `at_bound`, `at_equal_bounds` and `at_nan` are what the installed one does (cupyfused/ops/fused_scale_bias_clamp.py).

struct fused_scale_bias_clamp {
    template <typename T>
    static __device__ __forceinline__ T forward(T x, T scale, T bias, Optional<T> min_val, Optional<T> max_val)
    {
        return clamp(multiply_add(x, scale, bias), min_val, max_val);
    }

    template <typename T>
    static __device__ __forceinline__ void backward(T grad_out, T x, T scale, T bias, Optional<T> min_val, Optional<T> max_val,
                                                    T at_bound, T at_equal_bounds, T at_nan, T& grad_x, T& grad_scale, T& grad_bias)
    {
        T v = multiply_add(x, scale, bias);
        bool at_min = min_val.present && v == min_val.value, at_max = max_val.present && v == max_val.value;
        T weight = 1;
        if (at_min || at_max) weight = min_val.present && max_val.present && min_val.value == max_val.value ? at_equal_bounds : at_bound;
        if ((min_val.present && min_val.value != min_val.value) || (max_val.present && max_val.value != max_val.value)) weight *= at_nan;
        if (v != v && (min_val.present || max_val.present)) weight = at_nan;
        if ((min_val.present && v < min_val.value) || (max_val.present && v > max_val.value)) weight = 0;
        T g = weight == 0 ? (T)0 : grad_out * weight;  // an infinite grad_out outside the bounds is 0, not NaN
        grad_x = g * scale;
        grad_scale = g * x;
        grad_bias = g;
    }
};
