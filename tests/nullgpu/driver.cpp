// The driver's calls that torch makes by itself: expandable segments, and what is asked before them. And NVML's.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include "machine.h"

using namespace null;

namespace {

struct Piece {
    size_t bytes;
    int device;
};
std::mutex lock;
std::map<CUmemGenericAllocationHandle, Piece> pieces;
CUmemGenericAllocationHandle last_piece = 0;

CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }

}  // namespace

/// Called by each of the calls that torch knows and the null GPU does not have (building.py writes them).
EXPORTED void nullgpu_missing(const char* name) { fprintf(stderr, "null GPU: there is no %s\n", name); }

// -- cuDNN: only its version, which another one's may stand for --------------------------------------------------------

static const char* other_cudnn() { return getenv("NULLGPU_CUDNN"); }
static void* of_cudnn(const char* name) {
    void* cudnn = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
    return cudnn ? dlsym(cudnn, name) : nullptr;
}

EXPORTED size_t cudnnGetVersion() {
    if (other_cudnn()) return atoll(other_cudnn());
    void* own = of_cudnn("cudnnGetVersion");
    return own ? reinterpret_cast<size_t (*)()>(own)() : 0;
}
EXPORTED int cudnnGetProperty(int which, int* found) {  // 0, 1, 2: major, minor, patch
    constexpr int NOT_INITIALIZED = 1, FIRST_WITH_FIVE_DIGITS = 90000;
    if (other_cudnn()) {
        const int version = atoi(other_cudnn()), major_unit = version < FIRST_WITH_FIVE_DIGITS ? 1000 : 10000;
        const int parts[] = {version / major_unit, version % major_unit / 100, version % 100};
        return *found = parts[which], 0;
    }
    void* own = of_cudnn("cudnnGetProperty");
    return own ? reinterpret_cast<int (*)(int, int*)>(own)(which, found) : NOT_INITIALIZED;
}

// -- pieces of memory behind addresses --------------------------------------------------------------------------------

EXPORTED CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    void* found = reserve_addresses(bytes);
    if (!found) return CUDA_ERROR_OUT_OF_MEMORY;
    return *address = reinterpret_cast<CUdeviceptr>(found), CUDA_SUCCESS;
}
EXPORTED CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    return forget_addresses(reinterpret_cast<void*>(address), bytes), CUDA_SUCCESS;
}
EXPORTED CUresult cuMemCreate(
    CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long
) {
    constexpr Nanoseconds TAKES_NS = 20000;
    if (!take_bytes(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    spin(TAKES_NS);
    std::lock_guard<std::mutex> locked(lock);
    pieces[*handle = ++last_piece] = {bytes, current_device()};
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    std::lock_guard<std::mutex> locked(lock);
    const Piece piece = pieces[handle];
    pieces.erase(handle);
    return give_back_bytes(piece.bytes, piece.device), CUDA_SUCCESS;
}
EXPORTED CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemUnmap(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
EXPORTED CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
EXPORTED CUresult cuMemGetAllocationGranularity(
    size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags
) {
    return *bytes = 2 << 20, CUDA_SUCCESS;
}

// -- devices and contexts ---------------------------------------------------------------------------------------------

EXPORTED CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORTED CUresult cuDeviceGet(CUdevice* found, int number) { return *found = number, CUDA_SUCCESS; }
EXPORTED CUresult cuDeviceGetAttribute(int* found, CUdevice_attribute asked, CUdevice device) {
    return static_cast<CUresult>(cudaDeviceGetAttribute(found, static_cast<cudaDeviceAttr>(asked), device));
}
EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
    return *flags = 0, *is_active = 1, CUDA_SUCCESS;
}
EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice device) {
    return *found = reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1), CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetCurrent(CUcontext* found) { return cuDevicePrimaryCtxRetain(found, current_device()); }
EXPORTED CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORTED CUresult cuGetErrorString(CUresult status, const char** text) {
    const bool is_missing = status == CUDA_ERROR_NOT_SUPPORTED;
    return *text = is_missing ? "the null GPU does not have this call" : "an error of the null GPU", CUDA_SUCCESS;
}

/// The runtime's way to the driver: this library's own, and for all others one that says it is not supported.
static cudaError_t found_entry(const char* name, void** entry, cudaDriverEntryPointQueryResult* result) {
    static void* const here = [] {
        Dl_info facts;
        dladdr(reinterpret_cast<void*>(&nullgpu_missing), &facts);
        return dlopen(facts.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    *entry = here ? dlsym(here, name) : nullptr;
    if (!*entry) *entry = reinterpret_cast<void*>(&unsupported);
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDriverEntryPoint(
    const char* name, void** entry, unsigned long long, cudaDriverEntryPointQueryResult* result
) {
    return found_entry(name, entry, result);
}
EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** entry, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result
) {
    return found_entry(name, entry, result);
}

// -- NVML: only that it is there --------------------------------------------------------------------------------------

constexpr int NVML_NOT_SUPPORTED = 3;
EXPORTED int nvmlInit_v2() { return 0; }
EXPORTED int nvmlShutdown() { return 0; }
EXPORTED int nvmlDeviceGetCount_v2(unsigned* count) { return *count = settings().devices, 0; }
EXPORTED int nvmlDeviceGetHandleByIndex_v2(unsigned number, void** handle) {
    return *handle = reinterpret_cast<void*>(static_cast<uintptr_t>(number) + 1), 0;
}
EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(
    const char*, void** handle
) { return nvmlDeviceGetHandleByIndex_v2(0, handle); }
EXPORTED int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = CUDA_VERSION, 0; }
EXPORTED int nvmlSystemGetNVMLVersion() { return NVML_NOT_SUPPORTED; }
EXPORTED int nvmlDeviceGetNvLinkRemoteDeviceType() { return NVML_NOT_SUPPORTED; }
EXPORTED int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NVML_NOT_SUPPORTED; }
/// Torch before 2.14 asserts that this does not fail.
EXPORTED int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, 0; }
EXPORTED int nvmlDeviceGetGpuFabricInfo() { return NVML_NOT_SUPPORTED; }
EXPORTED int nvmlDeviceGetGpuFabricInfoV() { return NVML_NOT_SUPPORTED; }
EXPORTED const char* nvmlErrorString(int) { return "an error of the null GPU"; }
