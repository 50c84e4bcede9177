// The kernels of native/bits.cu on the processor, one thread after another. BITS_CU names that file.

#define __global__
#define __device__ inline

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

struct Dim {
    unsigned int x;
};

static thread_local Dim blockIdx, blockDim, threadIdx;

#include BITS_CU

using Kernel = void (*)(const void *, long long, void *, const void *);

extern "C" void launch(
    Kernel kernel, unsigned int blocks, unsigned int threads, const void *from, long long count, void *into, const void *table
) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(from, count, into, table);
}
