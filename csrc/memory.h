// Memory of the operating system: mapped lazily, on huge pages where the system allows it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace octavo {

// Zeroed pages that exist only once they are touched. Huge pages halve the time that streaming weights takes.
class PageBuffer {
  public:
    PageBuffer() = default;
    explicit PageBuffer(size_t bytes);  // throws std::bad_alloc
    ~PageBuffer();
    PageBuffer(PageBuffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    PageBuffer& operator=(PageBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    PageBuffer(const PageBuffer&) = delete;
    PageBuffer& operator=(const PageBuffer&) = delete;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data_);
    }

  private:
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace octavo
