// What the pretended GPU says of itself: an H100 of 80 GB (SXM).
#pragma once
#include <cstddef>

constexpr char DEVICE_NAME[] = "NVIDIA H100 80GB HBM3";
constexpr std::size_t DEVICE_MEMORY = std::size_t{80} << 30;
constexpr int CUDA_DRIVER = 13000;

// A device attribute by its number, which CUDA's runtime and driver share.
inline int device_attribute(int number) {
    switch (number) {
        case 1: return 1024;          // threads per block
        case 2: case 3: return 1024;  // block dimensions x, y
        case 4: return 64;            // z
        case 5: return 2147483647;    // grid dimension x
        case 6: case 7: return 65535; // y, z
        case 8: return 49152;         // shared memory per block
        case 9: return 65536;         // constant memory
        case 10: return 32;           // warp size
        case 12: return 65536;        // registers per block
        case 13: return 1980000;      // clock, kHz
        case 14: return 512;          // texture alignment
        case 16: return 132;          // multiprocessors
        case 36: return 2619000;      // memory clock, kHz
        case 37: return 5120;         // memory bus, bits
        case 38: return 50 << 20;     // L2 cache
        case 39: return 2048;         // threads per multiprocessor
        case 40: return 3;            // asynchronous engines
        case 75: return 9;            // compute capability, major
        case 76: return 0;            // minor
        case 81: return 233472;       // shared memory per multiprocessor
        case 82: return 65536;        // registers per multiprocessor
        case 97: return 232448;       // shared memory per block, opted in
        case 106: return 32;          // blocks per multiprocessor
        case 132: case 133: return 0; // multicast, fabric handles: none
        default: return 1;            // "can it": yes
    }
}
