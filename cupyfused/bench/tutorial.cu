// The kernels of a tutorial, float32, one element a thread. The C++ extension is built of them by nvcc, and the textbook use of
// CuPy by NVRTC. A gradient of scale is written for each element and summed by PyTorch.

extern "C" __global__ void tutorial_forward(const float* x, const float* scale, const float* bias, float* y, float min_val,
                                            float max_val, long long count)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = fminf(fmaxf(x[i] * scale[0] + bias[i], min_val), max_val);
}

extern "C" __global__ void tutorial_backward(const float* grad_out, const float* x, const float* scale, const float* bias,
                                             float* grad_x, float* grad_scale, float* grad_bias, float min_val, float max_val,
                                             long long count)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        float v = x[i] * scale[0] + bias[i];
        float g = v >= min_val && v <= max_val ? grad_out[i] : 0.0f;
        grad_x[i] = g * scale[0];
        grad_scale[i] = g * x[i];
        grad_bias[i] = g;
    }
}
