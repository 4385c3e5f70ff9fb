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

// The next number after a bound, up or down with direction -1: from there on a number is strictly inside. Beyond infinity NaN,
// which nothing passes.
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

    template <typename T>
    static __device__ __forceinline__ void backward(T grad_out, T x, T scale, T bias, Optional<T> min_val, Optional<T> max_val,
                                                    T at_bound, T at_equal_bounds, T at_nan, T& grad_x, T& grad_scale, T& grad_bias)
    {
        T v = multiply_add(x, scale, bias), g = gate(v, grad_out, min_val, max_val, at_bound, at_equal_bounds, at_nan);
        grad_x = g * scale;
        grad_scale = g * x;
        grad_bias = g;
    }

    // grad_out times what clamp lets through at v. What depends on the bounds alone is the same for a thread's elements, so the
    // compiler takes it out of their loop; the numbers are constants, and for most releases of PyTorch three comparisons and a
    // selection are left, without a branch, so that the elements overlap.
    template <typename T>
    static __device__ __forceinline__ T gate(T v, T grad_out, Optional<T> min_val, Optional<T> max_val, T at_bound, T at_equal_bounds, T at_nan)
    {
        const bool nan_passes = at_nan != 0;
        T seen = min_val.present || max_val.present ? v : 0;  // without bounds everything passes, NaN too
        bool has_min = min_val.present && !(nan_passes && min_val.value != min_val.value);
        bool has_max = max_val.present && !(nan_passes && max_val.value != max_val.value);
        T low = has_min ? min_val.value : -infinity((T*)0), high = has_max ? max_val.value : infinity((T*)0);
        T at_touch = has_min && has_max && low == high ? at_equal_bounds : at_bound;
        T first = has_min && at_touch != 1 ? inner_neighbour(low, 1) : low, last = has_max && at_touch != 1 ? inner_neighbour(high, -1) : high;

        bool inside = ((seen >= first) & (seen <= last)) | (nan_passes & (seen != seen));
        bool touches = (at_touch != 0) & (at_touch != 1) & (seen >= low) & (seen <= high);
        // Selected, not multiplied by 0: an infinite grad_out outside the bounds gives 0.
        return inside ? grad_out : touches ? grad_out * at_touch : (T)0;
    }
};
