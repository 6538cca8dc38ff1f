// A checksum of packed weights at the speed of memory: eight chains over 64-bit words, so that no multiplication waits for
// another. Each step is a bijection of the chain, so a single word that changed always shows; words that changed places
// show but for a chance of 2^-64. It guards against damage, not against somebody who forges a file.
#pragma once

#include <cstdint>
#include <cstring>

static inline uint64_t checksum(const uint8_t* data, int64_t size) {
    constexpr uint64_t ODD = 0x9e3779b97f4a7c15u;
    uint64_t chain[8] = {1, 2, 3, 4, 5, 6, 7, 8}, word[8];
    int64_t at = 0;
    for (; at + 64 <= size; at += 64) {
        std::memcpy(word, data + at, 64);
        for (int i = 0; i < 8; ++i) chain[i] = (chain[i] ^ word[i]) * ODD;
    }
    std::memset(word, 0, 64);
    std::memcpy(word, data + at, size_t(size - at));
    uint64_t all = uint64_t(size);
    for (int i = 0; i < 8; ++i) {
        chain[i] = (chain[i] ^ word[i]) * ODD;
        all = (all ^ (chain[i] >> 32) ^ chain[i]) * ODD;
    }
    return all ^ (all >> 32);
}
