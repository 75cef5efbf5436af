// CUDA's runtime without a GPU. Device memory is host memory, of which a page exists once it is touched, and zero at first; kernels do
// nothing; copies from and to the host, and small ones on the device, are made. Functions that are not here are those of the real
// runtime, which finds no device and says so.
#include "counts.h"
#include "device.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

constexpr size_t A_NUMBER = 8, SMALL = 1 << 16;  // bytes
auto& mutex = *new std::mutex;
auto& kernels = *new std::unordered_map<const void*, std::string>;  // by the address of the host's function
auto& streams = *new std::set<Stream*>;
auto& written = *new std::map<std::uintptr_t, size_t>;  // bytes of the last copy to here, if it is known what was copied
size_t allocated = 0;

struct Event {
    Graph* graph = nullptr;  // recorded in this capture
    unsigned long long capture = 0;
    bool recorded = false;
};
struct Launch {
    dim3 grid, block;
    size_t shared = 0;
    cudaStream_t stream = nullptr;
};
thread_local Launch next_launch;
std::atomic<unsigned long long> capturing{0};  // number of the capture that is under way: one at a time; 0: none
std::atomic<bool> broken{false};  // something was done that cannot be captured
thread_local unsigned long long captured_here = 0;  // the last capture that this thread began
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

// Whether a call of this thread that a capture forbids comes during one, which is invalid from then on.
bool breaks_a_capture(bool on_any_thread = false) {
    if (!capturing || (!on_any_thread && (captured_here != capturing || mode == cudaStreamCaptureModeRelaxed))) return false;
    return broken = true;
}

// Ranges of memory by their begin.
struct Ranges : std::map<std::uintptr_t, size_t> {
    bool contains(const void* pointer) const {
        const auto address = reinterpret_cast<std::uintptr_t>(pointer);
        auto next = upper_bound(address);
        return next != begin() && (--next, address < next->first + next->second);
    }
};
auto &device_memory = *new Ranges, &host_memory = *new Ranges;

cudaError_t allocate(Ranges& ranges, void** pointer, size_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    const bool on_device = &ranges == &device_memory;
    if (on_device && allocated + size > DEVICE_MEMORY) return cudaErrorMemoryAllocation;
    void* pages = mmap(nullptr, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return cudaErrorMemoryAllocation;
    ranges[reinterpret_cast<std::uintptr_t>(pages)] = size;
    if (on_device) allocated += size;
    *pointer = pages;
    return cudaSuccess;
}

cudaError_t release(Ranges& ranges, void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = ranges.find(reinterpret_cast<std::uintptr_t>(pointer));
    if (found == ranges.end()) return pointer ? cudaErrorInvalidValue : cudaSuccess;
    munmap(pointer, found->second ? found->second : 1);
    if (&ranges == &device_memory) {
        allocated -= found->second;
        written.erase(written.lower_bound(found->first), written.lower_bound(found->first + found->second));
    }
    ranges.erase(found);
    return cudaSuccess;
}

bool on_device(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    return device_memory.contains(pointer);
}

cudaError_t copy(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
    const bool to_device = kind == cudaMemcpyDefault ? on_device(to) : kind & 1;  // the kinds are two bits: from, to
    const bool from_device = kind == cudaMemcpyDefault ? on_device(from) : kind & 2;
    const std::string name = std::string("copy ") + (from_device ? 'D' : 'H') + '2' + (to_device ? 'D' : 'H');
    pretended_work(name.c_str(), stream);
    return move(to, from, size), cudaSuccess;
}

cudaError_t fill(void* pointer, int value, size_t size, cudaStream_t stream) {
    pretended_work("memset", stream);
    if (size <= SMALL) move(pointer, std::string(size, static_cast<char>(value)).data(), size);
    return cudaSuccess;
}

cudaError_t launch(const void* function, cudaStream_t stream) {
    const auto found = kernels.find(function);  // registered before main
    pretended_work(found == kernels.end() ? "kernel of an unknown name" : found->second.c_str(), stream);
    return cudaSuccess;
}

cudaError_t new_stream(cudaStream_t* handle) {
    auto* stream = new Stream;
    std::lock_guard<std::mutex> lock(mutex);
    streams.insert(stream);
    *handle = reinterpret_cast<cudaStream_t>(stream);
    return cudaSuccess;
}

cudaError_t record(cudaEvent_t event, cudaStream_t handle) {
    pretended_call("event record");
    const Stream* stream = stream_of(handle);
    *reinterpret_cast<Event*>(event) = stream && stream->graph ? Event{stream->graph, stream->capture, true} : Event{nullptr, 0, true};
    return cudaSuccess;
}

}  // namespace

void move(void* to, const void* from, size_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto source = reinterpret_cast<std::uintptr_t>(from);
    const auto last = written.lower_bound(source);
    bool known = !device_memory.contains(from) || (last != written.end() && last->first == source && last->second == size);
    if (size > SMALL) known |= last != written.end() && last->first < source + size;  // a part of it: the weights in a flat tensor
    if (!known && size <= A_NUMBER) {
        std::memset(to, 0, size);  // a kernel should have computed it, perhaps where something else has been before
    } else if (known || size <= SMALL || !device_memory.contains(to)) {
        std::memmove(to, from, size);
    }
    if (!device_memory.contains(to)) return;
    if (known) {
        written[reinterpret_cast<std::uintptr_t>(to)] = size;
    } else {
        written.erase(reinterpret_cast<std::uintptr_t>(to));
    }
}

// Kernels
PRETENDED void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
PRETENDED void __cudaRegisterFatBinaryEnd(void**) {}
PRETENDED void __cudaUnregisterFatBinary(void**) {}
PRETENDED char __cudaInitModule(void**) { return 0; }
PRETENDED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
PRETENDED void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    kernels[host] = std::string("kernel ") + name;
}
PRETENDED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    next_launch = {grid, block, shared, stream};
    return 0;
}
PRETENDED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, cudaStream_t* stream) {
    *grid = next_launch.grid, *block = next_launch.block, *shared = next_launch.shared, *stream = next_launch.stream;
    return cudaSuccess;
}
PRETENDED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    return *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function)), cudaSuccess;
}
PRETENDED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(kernel, stream);
}
PRETENDED cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(function, stream);
}
PRETENDED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
    return launch(function, config->stream);
}
PRETENDED cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) { return function(data), cudaSuccess; }
PRETENDED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
    return callback(stream, cudaSuccess, data), cudaSuccess;
}
PRETENDED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024, attributes->numRegs = 32, attributes->maxDynamicSharedSizeBytes = device_attribute(97);
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}
PRETENDED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
PRETENDED cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
PRETENDED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    return *blocks = 2, cudaSuccess;
}
PRETENDED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    return *blocks = 2, cudaSuccess;
}

// The device
PRETENDED cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
PRETENDED cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
PRETENDED cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
PRETENDED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    return *value = device_attribute(attribute), cudaSuccess;
}
PRETENDED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* all, int) {
    *all = {};
    std::strcpy(all->name, DEVICE_NAME);
    all->totalGlobalMem = DEVICE_MEMORY;
    all->major = device_attribute(75), all->minor = device_attribute(76), all->multiProcessorCount = device_attribute(16);
    all->warpSize = device_attribute(10), all->maxThreadsPerBlock = device_attribute(1);
    all->maxThreadsPerMultiProcessor = device_attribute(39), all->maxBlocksPerMultiProcessor = device_attribute(106);
    all->regsPerBlock = device_attribute(12), all->regsPerMultiprocessor = device_attribute(82);
    all->sharedMemPerBlock = device_attribute(8), all->sharedMemPerBlockOptin = device_attribute(97);
    all->sharedMemPerMultiprocessor = device_attribute(81), all->l2CacheSize = device_attribute(38);
    all->memoryBusWidth = device_attribute(37), all->asyncEngineCount = device_attribute(40);
    all->textureAlignment = device_attribute(14);
    for (int i = 0; i < 3; i++) all->maxThreadsDim[i] = device_attribute(2 + i), all->maxGridSize[i] = device_attribute(5 + i);
    return cudaSuccess;
}
PRETENDED cudaError_t cudaDeviceGetPCIBusId(char* name, int, int) { return std::strcpy(name, "0000:1b:00.0"), cudaSuccess; }
PRETENDED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
PRETENDED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
PRETENDED cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDA_DRIVER, cudaSuccess; }
PRETENDED cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDA_DRIVER, cudaSuccess; }
PRETENDED cudaError_t cudaGetLastError() { return cudaSuccess; }
PRETENDED cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
PRETENDED const char* cudaGetErrorName(cudaError_t error) { return error == 2 ? "cudaErrorMemoryAllocation" : "pretended error"; }
PRETENDED const char* cudaGetErrorString(cudaError_t error) { return error == 2 ? "out of memory" : "an error of the pretended GPU"; }
PRETENDED cudaError_t cudaProfilerStart() { return cudaSuccess; }
PRETENDED cudaError_t cudaProfilerStop() { return cudaSuccess; }
PRETENDED cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
    *function = nullptr;
    if (result) *result = cudaDriverEntryPointSymbolNotFound;
    return cudaErrorUnknown;
}

// Memory
PRETENDED cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    std::lock_guard<std::mutex> lock(mutex);
    return *free = DEVICE_MEMORY - allocated, *total = DEVICE_MEMORY, cudaSuccess;
}
PRETENDED cudaError_t cudaMalloc(void** pointer, size_t size) {
    pretended_call("allocation");
    if (breaks_a_capture()) return cudaErrorStreamCaptureUnsupported;
    return allocate(device_memory, pointer, size);
}
PRETENDED cudaError_t cudaFree(void* pointer) { return release(device_memory, pointer); }
PRETENDED cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
    pretended_call("allocation of pinned memory");
    return allocate(host_memory, pointer, size);
}
PRETENDED cudaError_t cudaFreeHost(void* pointer) { return release(host_memory, pointer); }
PRETENDED cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
    std::lock_guard<std::mutex> lock(mutex);
    return host_memory[reinterpret_cast<std::uintptr_t>(pointer)] = size, cudaSuccess;
}
PRETENDED cudaError_t cudaHostUnregister(void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    return host_memory.erase(reinterpret_cast<std::uintptr_t>(pointer)), cudaSuccess;
}
PRETENDED cudaError_t cudaGetSymbolAddress(void** pointer, const void*) { return allocate(device_memory, pointer, 4096); }
PRETENDED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    *attributes = {};
    attributes->type = device_memory.contains(pointer) ? cudaMemoryTypeDevice
                       : host_memory.contains(pointer) ? cudaMemoryTypeHost
                                                       : cudaMemoryTypeUnregistered;
    if (attributes->type != cudaMemoryTypeUnregistered) attributes->devicePointer = const_cast<void*>(pointer);
    if (attributes->type != cudaMemoryTypeDevice) attributes->hostPointer = const_cast<void*>(pointer);
    return cudaSuccess;
}
PRETENDED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, size, kind, stream);
}
PRETENDED cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
    pretended_call("synchronisation by a copy");
    if (breaks_a_capture()) return cudaErrorStreamCaptureUnsupported;
    return copy(to, from, size, kind, nullptr);
}
PRETENDED cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
PRETENDED cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
    return fill(pointer, value, size, stream);
}
PRETENDED cudaError_t cudaMemset(void* pointer, int value, size_t size) { return fill(pointer, value, size, nullptr); }

// Streams and events
PRETENDED cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_stream(stream); }
PRETENDED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return new_stream(stream); }
PRETENDED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return new_stream(stream); }
PRETENDED cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex);
    return streams.erase(stream_of(stream)), cudaSuccess;
}
PRETENDED cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
PRETENDED cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
PRETENDED cudaError_t cudaStreamSynchronize(cudaStream_t) {
    pretended_call("synchronisation of a stream");
    return breaks_a_capture() ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
PRETENDED cudaError_t cudaDeviceSynchronize() {
    pretended_call("synchronisation of the device");
    return breaks_a_capture(true) ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
PRETENDED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    pretended_call("synchronisation of an event");
    return cudaEventQuery(event);
}
PRETENDED cudaError_t cudaEventCreate(cudaEvent_t* event) {
    return *event = reinterpret_cast<cudaEvent_t>(new Event), cudaSuccess;
}
PRETENDED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
PRETENDED cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete reinterpret_cast<Event*>(event), cudaSuccess; }
PRETENDED cudaError_t cudaEventQuery(cudaEvent_t event) {
    const bool captured = capturing && reinterpret_cast<Event*>(event)->capture == capturing;
    return breaks_a_capture(captured) ? captured ? cudaErrorCapturedEvent : cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
PRETENDED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { return *milliseconds = 1, cudaSuccess; }
PRETENDED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return record(event, stream); }
PRETENDED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return record(event, stream); }
PRETENDED cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    pretended_call("wait for an event");
    const Event& waited = *reinterpret_cast<Event*>(event);
    Stream* stream = stream_of(handle);
    if (waited.graph && waited.capture == capturing) {
        if (!stream) return broken = true, cudaErrorStreamCaptureImplicit;  // the default stream cannot join
        stream->graph = waited.graph, stream->capture = waited.capture;
    } else if (stream && stream->graph && waited.recorded) {
        return broken = true, cudaErrorStreamCaptureIsolation;  // what a graph waits for must be in it
    }
    return cudaSuccess;
}

// Graphs
PRETENDED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) { return std::swap(mode, *other), cudaSuccess; }
PRETENDED cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
    static unsigned long long captures = 0;
    Stream* stream = stream_of(handle);
    if (!stream || stream->graph) return cudaErrorIllegalState;
    stream->graph = new Graph, stream->capture = ++captures;
    capturing = captured_here = captures, broken = false;
    return cudaSuccess;
}
PRETENDED cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    Graph* captured = stream_of(handle)->graph;
    std::lock_guard<std::mutex> lock(mutex);
    for (Stream* stream : streams) {
        if (stream->graph == captured) stream->graph = nullptr;
    }
    capturing = 0;
    if (broken) return delete captured, *graph = nullptr, cudaErrorStreamCaptureInvalidated;
    *graph = reinterpret_cast<cudaGraph_t>(captured);
    return captured ? cudaSuccess : cudaErrorIllegalState;
}
PRETENDED cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    const Stream* stream = stream_of(handle);
    *status = stream && stream->graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
PRETENDED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* capture,
    cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
    cudaStreamIsCapturing(handle, status);
    if (*status == cudaStreamCaptureStatusNone) return cudaSuccess;
    if (capture) *capture = stream_of(handle)->capture;
    if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream_of(handle)->graph);
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}
PRETENDED cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
    return *count = reinterpret_cast<Graph*>(graph)->calls.size(), cudaSuccess;
}
PRETENDED cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
    return cudaSuccess;
}
PRETENDED cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    return launch_graph(*reinterpret_cast<Graph*>(executable), stream), cudaSuccess;
}
PRETENDED cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete reinterpret_cast<Graph*>(graph), cudaSuccess; }
PRETENDED cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return delete reinterpret_cast<Graph*>(graph), cudaSuccess; }
