// cuBLAS, cuBLASLt, cuDNN and NCCL without a GPU: a call counts as one piece of work on its handle's stream. What needs no GPU, such
// as versions and tensor descriptors, is left to the real libraries. Most functions are declared by the arguments that they look at:
// in the x86-64 calling convention the caller removes the others. So no header is needed but the runtime's.
#include "counts.h"

#include <cstdint>
#include <cstring>

namespace {

constexpr int SUCCESS = 0;  // of all four libraries

struct Handle {
    const void* stream = nullptr;
};

}  // namespace

#define NOTHING(name) PRETENDED int name() { return SUCCESS; }
#define CREATES(name) PRETENDED int name(void** made) { return *made = new Handle, SUCCESS; }
#define WORKS(name, counted_as) PRETENDED int name(Handle* handle, ...) { return pretended_work(counted_as, handle->stream), SUCCESS; }

// cuBLAS
CREATES(cublasCreate_v2)
NOTHING(cublasDestroy_v2)
NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSetSmCountTarget)
NOTHING(cublasSetWorkspace_v2)
PRETENDED int cublasSetStream_v2(Handle* handle, const void* stream) { return handle->stream = stream, SUCCESS; }
PRETENDED int cublasGetMathMode(void*, int* mode) { return *mode = 0, SUCCESS; }
PRETENDED int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, SUCCESS; }
WORKS(cublasGemmEx, "product cublasGemmEx")
WORKS(cublasGemmStridedBatchedEx, "product cublasGemmStridedBatchedEx")
WORKS(cublasSgemmEx, "product cublasSgemmEx")
WORKS(cublasSgemm_v2, "product cublasSgemm")
WORKS(cublasDgemm_v2, "product cublasDgemm")
WORKS(cublasSgemmStridedBatched, "product cublasSgemmStridedBatched")
WORKS(cublasDgemmStridedBatched, "product cublasDgemmStridedBatched")
WORKS(cublasSgemv_v2, "product cublasSgemv")
WORKS(cublasDgemv_v2, "product cublasDgemv")
WORKS(cublasSdot_v2, "product cublasSdot")
WORKS(cublasDotEx, "product cublasDotEx")

// cuBLASLt
CREATES(cublasLtCreate)
CREATES(cublasLtMatmulDescCreate)
CREATES(cublasLtMatrixLayoutCreate)
CREATES(cublasLtMatmulPreferenceCreate)
NOTHING(cublasLtDestroy)
NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute)
NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
PRETENDED int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* result, int* found) {
    constexpr size_t one = 64 + 8 + 4 + 4 + 16;  // cublasLtMatmulHeuristicResult_t; all zero: a success without a workspace
    return std::memset(result, 0, one), *found = 1, SUCCESS;
}
PRETENDED int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, size_t,
    const void* stream) {
    return pretended_work("product cublasLtMatmul", stream), SUCCESS;
}

// cuDNN: graphs of one operation, and batch normalization by the older functions
CREATES(cudnnCreate)
NOTHING(cudnnDestroy)
PRETENDED int cudnnSetStream(Handle* handle, const void* stream) { return handle->stream = stream, SUCCESS; }
PRETENDED int cudnnGetStream(Handle* handle, const void** stream) { return *stream = handle->stream, SUCCESS; }

namespace {

enum { FORWARD = 10, FILTER = 11, DATA = 12 };                                                  // cudnnBackendDescriptorType_t
enum { RESULTS = 202, ENGINE = 300, GRAPH_ENGINES = 802, A_DESCRIPTOR = 15 };                    // attributes; a type of attribute

struct Descriptor {
    const char* work;  // what executing it counts as; handed on to every descriptor that contains it
};

const char* work_of(int type) {
    switch (type) {
        case FORWARD: return "convolution forward";
        case FILTER: return "convolution, gradient of the weight";
        case DATA: return "convolution, gradient of the input";
        default: return nullptr;
    }
}

}  // namespace

PRETENDED int cudnnBackendCreateDescriptor(int type, Descriptor** made) { return *made = new Descriptor{work_of(type)}, SUCCESS; }
PRETENDED int cudnnBackendDestroyDescriptor(Descriptor* descriptor) { return delete descriptor, SUCCESS; }
NOTHING(cudnnBackendFinalize)
PRETENDED int cudnnBackendSetAttribute(Descriptor* descriptor, int, int type, std::int64_t count, Descriptor* const* values) {
    if (type == A_DESCRIPTOR && count > 0 && values[0] && values[0]->work) descriptor->work = values[0]->work;
    return SUCCESS;
}
PRETENDED int cudnnBackendGetAttribute(
    Descriptor* descriptor, int name, int, std::int64_t asked, std::int64_t* count, void* values) {
    const bool one_engine = name == RESULTS || name == ENGINE || name == GRAPH_ENGINES;
    if (count) *count = one_engine;  // no notes, no knobs, no workspace
    if (!values || asked < 1) return SUCCESS;
    if (name == GRAPH_ENGINES) {
        *static_cast<std::int64_t*>(values) = 1;
    } else if (one_engine) {
        (*static_cast<Descriptor**>(values))->work = descriptor->work;
    } else {
        std::memset(values, 0, sizeof(std::int32_t));
    }
    return SUCCESS;
}
PRETENDED int cudnnBackendExecute(Handle* handle, Descriptor* plan, Descriptor*) {
    return pretended_work(plan->work ? plan->work : "cuDNN graph", handle->stream), SUCCESS;
}
WORKS(cudnnBatchNormalizationForwardTrainingEx, "batch normalization forward")
WORKS(cudnnBatchNormalizationForwardInference, "batch normalization forward")
WORKS(cudnnBatchNormalizationBackwardEx, "batch normalization backward")
PRETENDED int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    void*, int, int, void*, void*, void*, void*, void*, size_t* size) { return *size = 0, SUCCESS; }
PRETENDED int cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    void*, int, int, void*, void*, void*, void*, void*, void*, void*, size_t* size) { return *size = 0, SUCCESS; }
PRETENDED int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*, size_t* size) {
    return *size = 0, SUCCESS;
}

// NCCL: one process that believes in all ranks. Each of the others sends what this one sends, and adds nothing to a sum.
namespace {

struct Communicator {
    int size, rank;
};
struct UniqueId {
    char bytes[128];
};

size_t bytes(size_t count, int type) {
    constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return count * sizes[type];
}

int deliver(const char* name, const void* from, void* to, size_t size, int copies, const void* stream) {
    pretended_work(name, stream);
    for (int i = 0; i < copies; i++) move(static_cast<char*>(to) + i * size, from, size);
    return SUCCESS;
}

}  // namespace

PRETENDED int ncclGetUniqueId(UniqueId* id) { return *id = {}, SUCCESS; }
PRETENDED int ncclCommInitRank(Communicator** made, int size, UniqueId, int rank) {
    return *made = new Communicator{size, rank}, SUCCESS;
}
PRETENDED int ncclCommInitRankConfig(Communicator** made, int size, UniqueId id, int rank, void*) {
    return ncclCommInitRank(made, size, id, rank);
}
PRETENDED int ncclCommSplit(Communicator* whole, int, int, Communicator** made, void*) {  // into groups of all ranks only
    return *made = new Communicator(*whole), SUCCESS;
}
PRETENDED int ncclCommGetAsyncError(void*, int* error) { return *error = SUCCESS, SUCCESS; }
PRETENDED int ncclCommCount(Communicator* communicator, int* count) { return *count = communicator->size, SUCCESS; }
PRETENDED int ncclCommUserRank(Communicator* communicator, int* rank) { return *rank = communicator->rank, SUCCESS; }
PRETENDED int ncclRedOpCreatePreMulSum(int* operation) { return *operation = 0, SUCCESS; }
PRETENDED int ncclCommRegister(void*, void*, size_t, void** made) { return *made = nullptr, SUCCESS; }
PRETENDED int ncclCommMemStats(void*, int, std::uint64_t* value) { return *value = 0, SUCCESS; }
NOTHING(ncclRedOpDestroy)
NOTHING(ncclCommDeregister)
NOTHING(ncclCommAbort)
NOTHING(ncclCommDestroy)
NOTHING(ncclCommFinalize)
NOTHING(ncclGroupStart)
NOTHING(ncclGroupEnd)
PRETENDED const char* ncclGetLastError(void*) { return "none"; }
PRETENDED int ncclAllReduce(const void* from, void* to, size_t count, int type, int, void*, const void* stream) {
    return deliver("nccl all-reduce", from, to, bytes(count, type), 1, stream);
}
PRETENDED int ncclReduce(const void* from, void* to, size_t count, int type, int, int, void*, const void* stream) {
    return deliver("nccl reduce", from, to, bytes(count, type), to ? 1 : 0, stream);
}
PRETENDED int ncclBroadcast(const void* from, void* to, size_t count, int type, int, void*, const void* stream) {
    return deliver("nccl broadcast", from, to, bytes(count, type), 1, stream);
}
PRETENDED int ncclBcast(void*, size_t, int, int, void*, const void* stream) {
    return pretended_work("nccl broadcast", stream), SUCCESS;
}
PRETENDED int ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* ranks, const void* stream) {
    return deliver("nccl all-gather", from, to, bytes(count, type), ranks->size, stream);
}
PRETENDED int ncclReduceScatter(
    const void* from, void* to, size_t count, int type, int, Communicator* ranks, const void* stream) {
    const size_t size = bytes(count, type);
    return deliver("nccl reduce-scatter", static_cast<const char*>(from) + ranks->rank * size, to, size, 1, stream);
}
PRETENDED int ncclSend(const void*, size_t, int, int, void*, const void* stream) { return pretended_work("nccl send", stream), SUCCESS; }
PRETENDED int ncclRecv(void*, size_t, int, int, void*, const void* stream) { return pretended_work("nccl receive", stream), SUCCESS; }
