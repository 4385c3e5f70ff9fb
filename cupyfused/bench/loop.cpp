// The loop that every tutorial sets out from: one thread of the CPU.

extern "C" void loop(const float* x, float scale, const float* bias, float* y, float min_val, float max_val, long long count)
{
    for (long long i = 0; i < count; ++i) {
        float v = x[i] * scale + bias[i];
        y[i] = v < min_val ? min_val : v > max_val ? max_val : v;
    }
}
