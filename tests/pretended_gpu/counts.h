// What the pretended libraries share: the counter of calls by name, on streams that may be captured into a graph, and device memory.
#pragma once
#include <map>
#include <string>

#define PRETENDED extern "C" __attribute__((visibility("default")))

struct Graph {
    std::map<std::string, long> calls;  // what was captured, by name
};

struct Stream {
    Graph* graph = nullptr;  // while it is captured
    unsigned long long capture = 0;  // number of the capture
};

// Count a call that gives the device work. On a stream that is captured it becomes a node of the graph, and is counted as "captured".
PRETENDED void pretended_work(const char* name, const void* stream);
// Count a call of another kind.
PRETENDED void pretended_call(const char* name);
// Count the launch of a graph, and what is in it as "in a graph".
void launch_graph(const Graph& graph, const void* stream);
// A stream by its handle; null for the default streams, which cannot be captured.
Stream* stream_of(const void* handle);

// Move bytes that are on the host or on the device. On the device only what has come from the host is moved, and little else: of what
// kernels should have computed, a single number reads as 0, and nobody goes by the rest.
void move(void* to, const void* from, std::size_t size);
