// Matrix products: handles and layouts that torch makes, and the time that a product of that size takes.
#include <stdlib.h>
#include <string.h>

#include <cmath>

#include "machine.h"

using namespace null;

namespace {

struct Handle {
    cudaStream_t stream = nullptr;
    int math_mode = 0, pointer_mode = 0;
};
struct Layout {
    int type;
    double rows, columns;
};

constexpr int SUCCESS = 0, FLOAT32 = 0;  // cublasStatus_t, cudaDataType
/// Floating-point operations per nanosecond of an H100, roughly.
constexpr double OF_FLOAT32 = 45e3, OF_HALF = 600e3, LEAST_PRODUCT_NS = 3500;
constexpr size_t DESCRIPTION_BYTES = 256, HEURISTIC_BYTES = 128;

int product(cudaStream_t stream, double multiplications, int type) {
    queue(stream_of(stream), LEAST_PRODUCT_NS + 2 * multiplications / (type == FLOAT32 ? OF_FLOAT32 : OF_HALF));
    return SUCCESS;
}
int product(void* handle, double m, double n, double k, double count, int type) {
    return product(static_cast<Handle*>(handle)->stream, m * n * k * count, type);
}
Handle& of(void* handle) { return *static_cast<Handle*>(handle); }
int blank(void** made) { return *made = calloc(1, DESCRIPTION_BYTES), SUCCESS; }

}  // namespace

EXPORTED int cublasCreate_v2(void** handle) { return *handle = new Handle, SUCCESS; }
EXPORTED int cublasDestroy_v2(void* handle) { return delete &of(handle), SUCCESS; }
EXPORTED int cublasSetStream_v2(void* handle, void* stream) {
    return of(handle).stream = static_cast<cudaStream_t>(stream), SUCCESS;
}
EXPORTED int cublasSetWorkspace_v2(void*, void*, size_t) { return SUCCESS; }
EXPORTED int cublasSetMathMode(void* handle, int mode) { return of(handle).math_mode = mode, SUCCESS; }
EXPORTED int cublasGetMathMode(void* handle, int* mode) { return *mode = of(handle).math_mode, SUCCESS; }
EXPORTED int cublasSetPointerMode_v2(void* handle, int mode) { return of(handle).pointer_mode = mode, SUCCESS; }
EXPORTED int cublasGetPointerMode_v2(void* handle, int* mode) { return *mode = of(handle).pointer_mode, SUCCESS; }

// The calls' later arguments are not looked at, so they are not declared.
#define PRODUCT(name) \
    EXPORTED int name(void* handle, int, int, int m, int n, int k) { return product(handle, m, n, k, 1, FLOAT32); }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmEx)
#undef PRODUCT
EXPORTED int cublasGemmEx(void* handle, int, int, int m, int n, int k, const void*, const void*, int type) {
    return product(handle, m, n, k, 1, type);
}
EXPORTED int cublasSgemmStridedBatched(
    void* handle, int, int, int m, int n, int k, const float*, const float*, int, long long, const float*, int,
    long long, const float*, float*, int, long long, int count
) {
    return product(handle, m, n, k, count, FLOAT32);
}
EXPORTED int cublasGemmStridedBatchedEx(
    void* handle, int, int, int m, int n, int k, const void*, const void*, int type, int, long long, const void*, int,
    int, long long, const void*, void*, int, int, long long, int count
) {
    return product(handle, m, n, k, count, type);
}

EXPORTED size_t cublasLtGetVersion() { return 10 * CUDART_VERSION; }
EXPORTED int cublasLtMatrixLayoutCreate(
    void** made, int type, unsigned long long rows, unsigned long long columns, long long
) {
    return *made = new Layout{type, static_cast<double>(rows), static_cast<double>(columns)}, SUCCESS;
}
EXPORTED int cublasLtMatrixLayoutDestroy(void* layout) { return delete static_cast<Layout*>(layout), SUCCESS; }
EXPORTED int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, size_t) { return SUCCESS; }
EXPORTED int cublasLtMatmulDescCreate(void** made, int, int) { return blank(made); }
EXPORTED int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return SUCCESS; }
EXPORTED int cublasLtMatmulDescDestroy(void* one) { return free(one), SUCCESS; }
EXPORTED int cublasLtMatmulPreferenceCreate(void** made) { return blank(made); }
EXPORTED int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return SUCCESS; }
EXPORTED int cublasLtMatmulPreferenceDestroy(void* one) { return free(one), SUCCESS; }
EXPORTED int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void* results, int* found
) {
    return memset(results, 0, HEURISTIC_BYTES), *found = 1, SUCCESS;
}
EXPORTED int cublasLtMatmul(
    void*, void*, const void*, const void*, void* a, const void*, void* b, const void*, const void*, void* c, void*,
    void*, const void*, void*, size_t, void* stream
) {
    const Layout &left = *static_cast<Layout*>(a), &right = *static_cast<Layout*>(b), &out = *static_cast<Layout*>(c);
    // Each of m, n and k is in two of the three, whichever are transposed.
    const double squared = left.rows * left.columns * right.rows * right.columns * out.rows * out.columns;
    return product(static_cast<cudaStream_t>(stream), std::sqrt(squared), left.type);
}
