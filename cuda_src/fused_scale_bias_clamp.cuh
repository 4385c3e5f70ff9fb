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

// The neighbour of a bound on its inner side: strictly above `value`, or strictly below with direction -1, is from there on.
// NaN, which nothing passes, beyond infinity.
__device__ __forceinline__ float inner_neighbour(float value, int direction)
{
    if (value == 0) return bit_cast<float>(direction > 0 ? 0x00000001u : 0x80000001u);
    int32 step = (value > 0) == (direction > 0) ? 1 : -1;
    return bit_cast<float>(bit_cast<int32>(value) + step);  // one past infinity is a NaN
}
__device__ __forceinline__ double inner_neighbour(double value, int direction)
{
    if (value == 0) return bit_cast<double>(direction > 0 ? 0x0000000000000001ull : 0x8000000000000001ull);
    int64 step = (value > 0) == (direction > 0) ? 1 : -1;
    return bit_cast<double>(bit_cast<int64>(value) + step);
}

struct fused_scale_bias_clamp {
    template <typename T>
    static __device__ __forceinline__ T forward(T x, T scale, T bias, Optional<T> min_val, Optional<T> max_val)
    {
        return clamp(multiply_add(x, scale, bias), min_val, max_val);
    }

    // What the gradient is worth at v, for any rule.
    template <typename T>
    static __device__ __forceinline__ T weight(T v, Optional<T> min_val, Optional<T> max_val, T at_bound, T at_equal_bounds, T at_nan)
    {
        bool at_min = min_val.present && v == min_val.value, at_max = max_val.present && v == max_val.value;
        bool nan_bound = (min_val.present && min_val.value != min_val.value) || (max_val.present && max_val.value != max_val.value);
        T result = 1;
        if (at_min || at_max) result = at_min && at_max ? at_equal_bounds : at_bound;
        if (v != v || nan_bound) result = at_nan;
        if ((min_val.present && v < min_val.value) || (max_val.present && v > max_val.value)) result = 0;
        return result;
    }

    template <typename T>
    static __device__ __forceinline__ void backward(T grad_out, T x, T scale, T bias, Optional<T> min_val, Optional<T> max_val,
                                                    T at_bound, T at_equal_bounds, T at_nan, T& grad_x, T& grad_scale, T& grad_bias)
    {
        T v = multiply_add(x, scale, bias), g;
        if (at_nan == 0 && at_bound == at_equal_bounds && (at_bound == 0 || at_bound == 1)) {
            // All or nothing, as for number bounds in every PyTorch so far: two comparisons, against the bounds or, where they
            // themselves give nothing, their inner neighbours. A bound that is absent stops nothing but NaN.
            T low = min_val.value, high = max_val.value;
            if (at_bound == 0) { low = inner_neighbour(low, 1); high = inner_neighbour(high, -1); }
            bool passes = (v >= low || !min_val.present) && (v <= high || !max_val.present) && v == v;
            g = passes ? grad_out : (T)0;
        } else {
            T w = weight(v, min_val, max_val, at_bound, at_equal_bounds, at_nan);
            g = w == 0 ? (T)0 : grad_out * w;  // an infinite grad_out outside the bounds is 0, not NaN
        }
        grad_x = g * scale;
        grad_scale = g * x;
        grad_bias = g;
    }
};
