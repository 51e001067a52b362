// Device memory: host memory, charged to a device by the rules of torch_npu's caching allocator.
//
// What is modelled: sizes are rounded as NPUCachingAllocator rounds them, segments are reserved in its sizes, freed
// bytes stay reserved until empty_cache() or until memory runs out. What is not: fragmentation (the free bytes of a
// pool count as one block), other processes on the same device, and workspaces inside of operators.
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include "npuemu.h"

namespace npuemu {

using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr int64_t kPadding = 32;               // torch_npu adds this to every request
constexpr int64_t kMinBlock = 512;             // and rounds up to a multiple of this
constexpr int64_t kSmallSize = 1 << 20;        // largest block of the small pool
constexpr int64_t kSmallSegment = 2 << 20;     // segments of the small pool
constexpr int64_t kLargeSegment = 20 << 20;    // segments of the large pool for blocks below kMinLargeAlloc
constexpr int64_t kMinLargeAlloc = 10 << 20;   // from here on a segment holds one block,
constexpr int64_t kRoundLarge = 2 << 20;       // rounded up to a multiple of this
constexpr int64_t kDefaultMemory = int64_t(64) << 30;

static int64_t round_up(int64_t bytes, int64_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

static int64_t block_size(int64_t requested) { return round_up(requested + kPadding, kMinBlock); }

static int64_t segment_size(int64_t block) {
  if (block <= kSmallSize) return kSmallSegment;
  return block < kMinLargeAlloc ? kLargeSegment : round_up(block, kRoundLarge);
}

static StatType pool_of(int64_t block) { return block <= kSmallSize ? StatType::SMALL_POOL : StatType::LARGE_POOL; }

// 59.36 GiB, as the allocators of PyTorch print it
static std::string format_size(int64_t bytes) {
  char text[64];
  if (bytes <= 1024) std::snprintf(text, sizeof text, "%lld bytes", static_cast<long long>(bytes));
  else if (bytes <= 1048576) std::snprintf(text, sizeof text, "%.2f KiB", bytes / 1024.0);
  else if (bytes <= 1073741824) std::snprintf(text, sizeof text, "%.2f MiB", bytes / 1048576.0);
  else std::snprintf(text, sizeof text, "%.2f GiB", bytes / 1073741824.0);
  return text;
}

static int64_t total_memory() {
  static const int64_t bytes = integer_from_env("NPUEMU_MEMORY_BYTES", kDefaultMemory);
  return bytes;
}

// The books of one device.
class Memory {
 public:
  // Books a block for `requested` bytes and returns its size, or throws OutOfMemoryError.
  int64_t take(int64_t requested, c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t block = block_size(requested);
    const StatType pool = pool_of(block);
    if (free_in(pool) < block) reserve(block, pool, device);
    increase(stats_.allocation, pool, 1);
    increase(stats_.active, pool, 1);
    increase(stats_.allocated_bytes, pool, block);
    increase(stats_.active_bytes, pool, block);
    increase(stats_.requested_bytes, pool, requested);
    return block;
  }

  void give_back(int64_t block, int64_t requested) {
    std::lock_guard<std::mutex> lock(mutex_);
    const StatType pool = pool_of(block);
    decrease(stats_.allocation, pool, 1);
    decrease(stats_.active, pool, 1);
    decrease(stats_.allocated_bytes, pool, block);
    decrease(stats_.active_bytes, pool, block);
    decrease(stats_.requested_bytes, pool, requested);
  }

  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    release_free_segments();
  }

  DeviceStats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  int64_t free_on_device() {
    std::lock_guard<std::mutex> lock(mutex_);
    return total_memory() - current(stats_.reserved_bytes, StatType::AGGREGATE);
  }

  void reset_peaks() {
    for_all([](auto& stat) { stat.reset_peak(); });
  }

  void reset_accumulated() {
    for_all([](auto& stat) { stat.reset_accumulated(); });
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.num_alloc_retries = stats_.num_ooms = 0;
  }

 private:
  std::mutex mutex_;
  DeviceStats stats_;

  static int64_t& current(StatArray& stats, StatType type) { return stats[static_cast<size_t>(type)].current; }

  static void increase(StatArray& stats, StatType pool, int64_t amount) {
    stats[static_cast<size_t>(StatType::AGGREGATE)].increase(amount);
    stats[static_cast<size_t>(pool)].increase(amount);
  }

  static void decrease(StatArray& stats, StatType pool, int64_t amount) {
    stats[static_cast<size_t>(StatType::AGGREGATE)].decrease(amount);
    stats[static_cast<size_t>(pool)].decrease(amount);
  }

  int64_t free_in(StatType pool) {
    return current(stats_.reserved_bytes, pool) - current(stats_.allocated_bytes, pool);
  }

  // A new segment for the block; before giving up, what is cached goes back to the device, as on the real one.
  void reserve(int64_t block, StatType pool, c10::DeviceIndex device) {
    const int64_t segment = segment_size(block);
    auto& reserved = current(stats_.reserved_bytes, StatType::AGGREGATE);
    if (reserved + segment > total_memory()) {
      ++stats_.num_alloc_retries;
      release_free_segments();
    }
    if (reserved + segment > total_memory()) {
      ++stats_.num_ooms;
      const auto allocated = format_size(current(stats_.allocated_bytes, StatType::AGGREGATE));
      TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", format_size(segment), " (NPU ",
                       int(device), "; ", format_size(total_memory()), " total capacity; ", allocated,
                       " already allocated; ", allocated, " current active; ", format_size(total_memory() - reserved),
                       " free; ", format_size(reserved), " reserved in total by PyTorch) If reserved memory is >> "
                       "allocated memory try setting max_split_size_mb to avoid fragmentation.");
    }
    increase(stats_.segment, pool, 1);
    increase(stats_.reserved_bytes, pool, segment);
  }

  void release_free_segments() {
    for (const StatType pool : {StatType::SMALL_POOL, StatType::LARGE_POOL}) {
      const int64_t needed = round_up(current(stats_.allocated_bytes, pool), kRoundLarge);
      const int64_t freed = current(stats_.reserved_bytes, pool) - needed;
      if (freed <= 0) continue;
      decrease(stats_.reserved_bytes, pool, freed);
      if (needed == 0) decrease(stats_.segment, pool, current(stats_.segment, pool));
    }
  }

  template <class Function>
  void for_all(Function function) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (StatArray* array : {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.allocated_bytes,
                             &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes})
      for (auto& stat : *array) function(stat);
  }
};

// Never destroyed: tensors of static lifetime are freed after it would be.
static Memory& memory_of(c10::DeviceIndex device) {
  static auto* memories = new std::array<Memory, kMaxDevices>();
  return memories->at(device);
}

// Context of every npu DataPtr: owns the host memory and gives back what was charged.
struct Block {
  c10::DataPtr host;
  c10::DeviceIndex device;
  int64_t requested;
  int64_t charged;

  ~Block() {
    if (charged) memory_of(device).give_back(charged, requested);
  }
  static void destroy(void* block) { delete static_cast<Block*>(block); }
};

c10::DataPtr charge_to_device(c10::DataPtr host, size_t bytes, c10::DeviceIndex device) {
  void* data = host.get();
  const auto requested = static_cast<int64_t>(bytes);
  const int64_t charged = bytes ? memory_of(device).take(requested, device) : 0;
  return {data, new Block{std::move(host), device, requested, charged}, &Block::destroy, c10::Device(kNPU, device)};
}

struct NpuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = index_of(std::nullopt);
    check_usable(device);
    if (bytes == 0) return {nullptr, c10::Device(kNPU, device)};
    return charge_to_device(c10::GetCPUAllocator()->allocate(bytes), bytes, device);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) memory_of(device).empty_cache();
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // every operator has finished when it returns
  DeviceStats getDeviceStats(c10::DeviceIndex device) override { return memory_of(device).stats(); }
  void resetAccumulatedStats(c10::DeviceIndex device) override { memory_of(device).reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex device) override { memory_of(device).reset_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {static_cast<size_t>(memory_of(device).free_on_device()), static_cast<size_t>(total_memory())};
  }
};

c10::Allocator* device_allocator() {
  static auto* allocator = new NpuAllocator();
  return allocator;
}

// Page-locked host memory is plain host memory whose address ranges are remembered.
static std::mutex g_pinned_mutex;
static std::map<uintptr_t, size_t> g_pinned_ranges;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    bytes = std::max<size_t>(bytes, 1);
    TORCH_CHECK(::posix_memalign(&data, 4096, bytes) == 0, "no host memory for ", bytes, " pinned bytes");
    std::lock_guard<std::mutex> lock(g_pinned_mutex);
    g_pinned_ranges[reinterpret_cast<uintptr_t>(data)] = bytes;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  static void release(void* data) {
    std::lock_guard<std::mutex> lock(g_pinned_mutex);
    g_pinned_ranges.erase(reinterpret_cast<uintptr_t>(data));
    std::free(data);
  }
};

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return allocator;
}

bool is_pinned(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(g_pinned_mutex);
  auto after = g_pinned_ranges.upper_bound(address);
  if (after == g_pinned_ranges.begin()) return false;
  const auto& [start, bytes] = *std::prev(after);
  return address < start + bytes;
}

}  // namespace npuemu
