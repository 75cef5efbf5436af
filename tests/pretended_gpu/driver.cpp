// CUDA's driver, libcuda.so.1, without a GPU: what Triton and PyTorch's compiled kernels call. Kernels are loaded and launched by
// name; they do nothing.
#include "counts.h"
#include "device.h"

#include <cuda.h>

#include <cstring>

namespace {

template <class Type>
CUresult give(Type* place, Type value) {
    return *place = value, CUDA_SUCCESS;
}
const auto CONTEXT = reinterpret_cast<CUcontext>(1);
const auto MODULE = reinterpret_cast<CUmodule>(1);

CUresult launch(CUfunction function, CUstream stream) {
    return pretended_work(reinterpret_cast<const char*>(function), stream), CUDA_SUCCESS;
}

}  // namespace

PRETENDED CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
PRETENDED CUresult cuDriverGetVersion(int* version) { return give(version, CUDA_DRIVER); }
PRETENDED CUresult cuGetErrorString(CUresult, const char** text) { return give<const char*>(text, "an error of the pretended driver"); }
PRETENDED CUresult cuDeviceGetCount(int* count) { return give(count, 1); }
PRETENDED CUresult cuDeviceGet(CUdevice* device, int) { return give(device, 0); }
PRETENDED CUresult cuDeviceGetName(char* name, int length, CUdevice) { return std::strncpy(name, DEVICE_NAME, length), CUDA_SUCCESS; }
PRETENDED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    return give(value, device_attribute(attribute));
}
PRETENDED CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { return *flags = 0, give(active, 1); }
PRETENDED CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return give(context, CONTEXT); }
PRETENDED CUresult cuCtxGetCurrent(CUcontext* context) { return give(context, CONTEXT); }
PRETENDED CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
PRETENDED CUresult cuCtxGetLimit(size_t* value, CUlimit) { return give<size_t>(value, 0); }
PRETENDED CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
PRETENDED CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr pointer) {
    return give(static_cast<CUdeviceptr*>(value), pointer);
}

PRETENDED CUresult cuModuleLoad(CUmodule* module, const char*) { return give(module, MODULE); }
PRETENDED CUresult cuModuleLoadData(CUmodule* module, const void*) { return give(module, MODULE); }
PRETENDED CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) { return give(module, MODULE); }
PRETENDED CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
PRETENDED CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    return give(function, reinterpret_cast<CUfunction>(strdup((std::string("triton ") + name).c_str())));
}
PRETENDED CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    return give(value, attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 100 : 0);
}
PRETENDED CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
PRETENDED CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
PRETENDED CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) { return give(blocks, 2); }
PRETENDED CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) { return give(clusters, 1); }

PRETENDED CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
    CUstream stream, void**, void**) {
    return launch(function, stream);
}
PRETENDED CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
    CUstream stream, void**) {
    return launch(function, stream);
}
PRETENDED CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
    return launch(function, config->hStream);
}

// Asked for when libraries are loaded, never called here.
PRETENDED CUresult cuLinkCreate_v2(unsigned, CUjit_option*, void**, CUlinkState*) { return CUDA_ERROR_NOT_SUPPORTED; }
PRETENDED CUresult cuLinkComplete(CUlinkState, void**, size_t*) { return CUDA_ERROR_NOT_SUPPORTED; }
PRETENDED CUresult cuLinkAddData_v2(
    CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*, void**) { return CUDA_ERROR_NOT_SUPPORTED; }
PRETENDED CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
    const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
