// What a CUDA kernel takes for granted, for g++: the tests run the kernels' own text on a CPU with it, under AddressSanitizer.
//
// Put before the kernel's text by cupyfused/_host.py. The threads of a block are fibers that run one after the other, each up to
// its next barrier; a round of all of them is what __syncthreads separates. A shuffle is two rounds: all write, all read.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <setjmp.h>
#include <ucontext.h>

#define CUPYFUSED_HOST
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx;

template <typename T> static inline T min(T a, T b) { return b < a ? b : a; }

namespace host {

constexpr size_t STACK_BYTES = 256 << 10;
enum Stop { FINISHED, BARRIER, SHUFFLE };

static ucontext_t scheduler, fiber[BLOCK];
static char* stack = (char*)malloc(STACK_BYTES * BLOCK);
static Stop stopped[BLOCK];
static unsigned long long exchanged[BLOCK];
static void (*body)();
// A switch by setjmp makes no system call; each swapcontext makes one, for the signal mask, and tests took 2 to 5 times as long.
static jmp_buf scheduler_point, fiber_point[BLOCK];
static bool begun[BLOCK];

static void stop(Stop why)
{
    unsigned me = threadIdx.x;
    stopped[me] = why;
    if (_setjmp(fiber_point[me]) == 0) _longjmp(scheduler_point, 1);
}

static void enter()
{
    body();
    stop(FINISHED);
}

static void run_block()
{
    for (unsigned thread = 0; thread < BLOCK; ++thread) {
        getcontext(&fiber[thread]);
        fiber[thread].uc_stack.ss_sp = stack + STACK_BYTES * thread;
        fiber[thread].uc_stack.ss_size = STACK_BYTES;
        fiber[thread].uc_link = &scheduler;
        makecontext(&fiber[thread], enter, 0);
        begun[thread] = false;
    }
    do {
        for (volatile unsigned thread = 0; thread < BLOCK; ++thread) {
            threadIdx.x = thread;
            if (_setjmp(scheduler_point) == 0) {
                if (begun[thread]) _longjmp(fiber_point[thread], 1);
                begun[thread] = true;
                setcontext(&fiber[thread]);
            }
            if (stopped[thread] != stopped[0]) {
                fprintf(stderr, "threads 0 and %u of a block stop at different barriers: a GPU would hang\n", thread);
                abort();
            }
        }
    } while (stopped[0] != FINISHED);
}

}  // namespace host

static inline void __syncthreads() { host::stop(host::BARRIER); }

template <typename T> static inline T __shfl_xor_sync(unsigned, T value, int distance)
{
    memcpy(&host::exchanged[threadIdx.x], &value, sizeof value);
    host::stop(host::SHUFFLE);
    memcpy(&value, &host::exchanged[threadIdx.x ^ distance], sizeof value);
    host::stop(host::SHUFFLE);
    return value;
}
