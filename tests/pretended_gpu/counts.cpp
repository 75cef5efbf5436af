// Counts calls by name; Python reads them by pretended_counts().
#include "counts.h"

#include <cxxabi.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace {

// Never destroyed: threads still call while the process ends.
auto& mutex = *new std::mutex;
auto& counts = *new std::unordered_map<std::string, long>;

// "kernel _Z...": the name of a C++ function as it was written.
std::string readable(const std::string& name) {
    const size_t mangled = name.find("_Z");
    if (mangled == std::string::npos || name.compare(0, mangled, name, 0, name.find_last_of(' ', mangled) + 1) != 0) return name;
    int status = 0;
    char* plain = abi::__cxa_demangle(name.c_str() + mangled, nullptr, nullptr, &status);
    const std::string result = status == 0 ? name.substr(0, mangled) + plain : name;
    std::free(plain);
    return result;
}

std::string text() {
    std::lock_guard<std::mutex> lock(mutex);
    std::string lines;
    for (const auto& [name, count] : counts) lines += std::to_string(count) + '\t' + readable(name) + '\n';
    return lines;
}

}  // namespace

Stream* stream_of(const void* handle) {
    const bool is_default = reinterpret_cast<std::uintptr_t>(handle) <= 2;  // null, cudaStreamLegacy, cudaStreamPerThread
    return is_default ? nullptr : static_cast<Stream*>(const_cast<void*>(handle));
}

PRETENDED void pretended_work(const char* name, const void* handle) {
    const Stream* stream = stream_of(handle);
    std::lock_guard<std::mutex> lock(mutex);
    if (stream && stream->graph) {
        stream->graph->calls[name]++;
        counts[std::string("captured ") + name]++;
    } else {
        counts[name]++;
    }
}

PRETENDED void pretended_call(const char* name) {
    std::lock_guard<std::mutex> lock(mutex);
    counts[name]++;
}

void launch_graph(const Graph& graph, const void* stream) {
    pretended_work("graph launch", stream);
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [name, count] : graph.calls) counts["in a graph " + name] += count;
}

// "COUNT\tNAME\n" for each name. Valid until the next call from the same thread.
PRETENDED const char* pretended_counts() {
    static thread_local std::string kept;
    kept = text();
    return kept.c_str();
}
