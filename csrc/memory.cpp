#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace octavo {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

PageBuffer::PageBuffer(size_t bytes) {
    if (bytes == 0) return;
    // Large buffers start on a huge page: map a little more, keep the aligned middle.
    const size_t align = bytes >= kHugePage ? kHugePage : 0;
    const size_t mapped = bytes + align;
    void* raw = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) throw std::bad_alloc();
    auto start = reinterpret_cast<uintptr_t>(raw);
    if (align) {
        const uintptr_t aligned = (start + align - 1) / align * align;
        const uintptr_t end = (aligned + bytes + 4095) / 4096 * 4096;
        if (aligned > start) munmap(raw, aligned - start);
        if (start + mapped > end) munmap(reinterpret_cast<void*>(end), start + mapped - end);
        start = aligned;
#ifdef MADV_HUGEPAGE
        madvise(reinterpret_cast<void*>(start), bytes, MADV_HUGEPAGE);
#endif
    }
    data_ = reinterpret_cast<uint8_t*>(start);
    bytes_ = bytes;
}

PageBuffer::~PageBuffer() {
    if (data_) munmap(data_, (bytes_ + 4095) / 4096 * 4096);
}

}  // namespace octavo
