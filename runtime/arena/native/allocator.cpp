// Torch's allocator for CPU memory. It wraps the previous one, counts and records blocks, and serves threads from an
// arena on request. Python calls the C functions at the end.
//
// Every block has `data == context` and one deleter, as raw_allocate requires. Blocks are counted, recorded or served
// by thread. Other threads, and all threads without a request, get the wrapped allocator's own blocks.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <new>
#include <utility>

#include "arena.h"
#include "blocks.h"
#include "pool.h"
#include "scopes.h"

namespace {

using pooch::Arena;
using pooch::Block;
using pooch::Scope;

// A list that only grows, also while other threads read it. Its items are never freed.
template <class Item>
class Register {
 public:
  void add(Item* item) noexcept {
    std::lock_guard<std::mutex> guard(mutex);
    item->following = first_.load();
    first_.store(item);
  }
  template <class Visit>
  void for_each(Visit visit) noexcept {
    for (Item* item = first_.load(); item != nullptr; item = item->following) visit(*item);
  }
  std::mutex mutex; // of additions

 private:
  std::atomic<Item*> first_{nullptr};
};

// Never destroyed, because tensors die while the process exits.
struct State {
  pooch::LiveBlocks blocks;
  Register<Scope> scopes;
  Register<Arena> arenas;
  pooch::Pool pool;
  std::atomic<int64_t> next_id{0};
  std::atomic<uint32_t> threads{0}, serials{0};
  std::atomic<int> huge_pages{0}; // number of blocks of code that request them
  c10::Allocator* inner = nullptr;
  c10::DeleterFnPtr give_back = nullptr;
};
State& state = *new State;

// The requests of this thread. It has no destructor, because tensors die while threads end.
struct Here {
  uint32_t thread;
  Scope* scope;
  Arena* arena;
  int64_t step_number;
  int asides; // number of open blocks of code outside the step; they are not served
};
thread_local Here here{};

uint32_t this_thread() noexcept {
  if (here.thread == 0) here.thread = state.threads.fetch_add(1) + 1;
  return here.thread;
}

// False if there is no memory for the block's entry: then it is not counted or recorded.
bool note_birth(void* address, size_t size_bytes, Arena* arena, bool is_pooled = false) noexcept {
  Scope* scope = here.scope;
  const Block block{address,       size_bytes, state.next_id.fetch_add(1, std::memory_order_relaxed),
                    this_thread(), scope ? scope->serial : 0, arena, is_pooled};
  if (!state.blocks.insert(block)) return false;
  if (scope != nullptr) scope->born(block);
  return true;
}

// The deleter of every block. It removes the address's entry before the address can be reused.
void release(void* address) {
  if (address == nullptr) return;
  const Block block = state.blocks.remove(address);
  if (block.address == nullptr) { // a block from before this allocator, by raw_deallocate
    state.give_back(address);
    return;
  }
  state.scopes.for_each([&](Scope& scope) { scope.died(block, &scope == here.scope); });
  if (block.is_outside()) {
    state.give_back(address);
    return;
  }
  c10::profiledCPUMemoryReporter().Delete(address);
  if (block.is_pooled) {
    state.pool.give_back(address, block.size_bytes);
    return;
  }
  block.arena->give_back(address);
}

// Fresh memory is slow in small pages. If freed memory is released at once, each large block is fresh memory.
void ask_for_huge_pages(void* address, size_t size_bytes) noexcept {
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const auto from = reinterpret_cast<uintptr_t>(address);
  const uintptr_t begin = (from + kHugePage - 1) / kHugePage * kHugePage, end = (from + size_bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size_bytes) override {
    if (size_bytes == 0) return owned(nullptr);
    if (here.arena != nullptr && here.asides == 0) {
      if (c10::DataPtr served = from_arena(size_bytes)) return served;
    }
    const bool is_of_step = here.asides == 0 && state.pool.is_open_for(here.scope);
    if (is_of_step && size_bytes >= state.pool.least_bytes()) {
      if (c10::DataPtr pooled = from_pool(size_bytes)) return pooled;
    }
    c10::DataPtr block = state.inner->allocate(size_bytes);
    // Only a plain block can be freed by its address; others keep their own deleter.
    if (block.get() != block.get_context() || block.get_deleter() != state.give_back) return block;
    void* address = block.release_context();
    if (state.huge_pages.load(std::memory_order_relaxed) > 0) ask_for_huge_pages(address, size_bytes);
    note_birth(address, size_bytes, nullptr);
    if (is_of_step) state.pool.look();
    return owned(address);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { state.inner->copy_data(to, from, count); }

 private:
  static c10::DataPtr owned(void* address) noexcept {
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static c10::DataPtr from_arena(size_t size_bytes) {
    Arena* arena = here.arena;
    void* address = arena->take(size_bytes, here.step_number);
    if (address == nullptr) return {};
    if (!note_birth(address, size_bytes, arena)) {
      arena->give_back(address);
      return {};
    }
    c10::DataPtr block = owned(address);
    c10::profiledCPUMemoryReporter().New(address, size_bytes); // the wrapped allocator does this for its own blocks
    return block;
  }
  static c10::DataPtr from_pool(size_t size_bytes) {
    void* address = state.pool.take(size_bytes);
    if (address == nullptr) return {};
    if (!note_birth(address, size_bytes, nullptr, true)) {
      state.pool.give_back(address, size_bytes);
      return {};
    }
    c10::DataPtr block = owned(address);
    c10::profiledCPUMemoryReporter().New(address, size_bytes);
    return block;
  }
};
Allocator& allocator = *new Allocator;

// A forked child holds no lock of another thread, and the parent's requests end there. Blocks in an arena stay readable
// and writable.
void before_fork() noexcept {
  state.scopes.mutex.lock();
  state.arenas.mutex.lock();
  state.scopes.for_each([](Scope& scope) { scope.mutex.lock(); });
  state.arenas.for_each([](Arena& arena) { arena.mutex.lock(); });
  state.pool.mutex.lock();
  state.blocks.lock();
}

void after_fork() noexcept {
  state.blocks.unlock();
  state.pool.mutex.unlock();
  state.arenas.for_each([](Arena& arena) { arena.mutex.unlock(); });
  state.scopes.for_each([](Scope& scope) { scope.mutex.unlock(); });
  state.arenas.mutex.unlock();
  state.scopes.mutex.unlock();
}

void in_child() noexcept {
  state.scopes.for_each([](Scope& scope) { scope.stop(); });
  state.arenas.for_each([](Arena& arena) { arena.stop(); });
  state.pool.stop();
  here.scope = nullptr;
  here.arena = nullptr;
  after_fork();
}

enum Installed { kDone = 0, kNotPlain = 1, kOutranked = 2, kFailed = 3 };

Installed install() {
  if (state.inner != nullptr) return c10::GetCPUAllocator() == &allocator ? kDone : kOutranked;
  c10::Allocator* inner = c10::GetCPUAllocator();
  if (inner == nullptr || inner->raw_deleter() == nullptr) return kNotPlain;
  state.inner = inner;
  state.give_back = inner->raw_deleter();
  if (pthread_atfork(&before_fork, &after_fork, &in_child) != 0) return kFailed;
  c10::SetCPUAllocator(&allocator, 200);
  return c10::GetCPUAllocator() == &allocator ? kDone : kOutranked;
}

void leave(Arena* arena) noexcept {
  if (here.arena == arena) here.arena = nullptr;
}

} // namespace

// ---- The C functions. None raises; handles are addresses of objects that are never freed. ---------------------------

#define POOCH extern "C" __attribute__((visibility("default")))

POOCH int pooch_install() noexcept {
  try {
    return install();
  } catch (...) {
    return kFailed;
  }
}
POOCH int64_t pooch_live_blocks() noexcept { return state.blocks.count(); }
POOCH int64_t pooch_next_block() noexcept { return state.next_id.load(); }
// The number in logs of the live block that begins there; -1 if none does, or if it existed before this allocator.
POOCH int64_t pooch_block_at(const void* address) noexcept {
  const Block found = state.blocks.at(address);
  return found.address == nullptr ? -1 : found.id;
}

// Whether a live block begins there that lies in an arena.
POOCH int pooch_is_served(const void* address) noexcept { 
  const Block found = state.blocks.at(address);
  return found.address != nullptr && !found.is_outside();
}

POOCH Scope* pooch_scope_new() noexcept {
  auto* scope = new (std::nothrow) Scope(state.serials.fetch_add(1) + 1);
  if (scope != nullptr) state.scopes.add(scope);
  return scope;
}
// Joins a scope. Returns the scope that this thread was in, to join it again; null is none.
POOCH Scope* pooch_scope_join(Scope* scope) noexcept { return std::exchange(here.scope, scope); }

// Enters (1) or leaves (-1) a block of code on this thread that no arena serves.
POOCH void pooch_set_aside(int change) noexcept { here.asides += change; }

// Enters (1) or leaves (-1) a block of code of this process in which large blocks request huge pages.
POOCH void pooch_want_huge_pages(int change) noexcept { state.huge_pages.fetch_add(change); }

POOCH void pooch_count_begin(Scope* scope, int64_t unit_bytes) noexcept {
  scope->begin_count(unit_bytes, this_thread(), state.next_id.load());
}
// Live bytes (0), and the most of them (1); those of blocks that lie in no arena (2), and the most of them (3).
POOCH int64_t pooch_count_of(const Scope* scope, int which) noexcept { return scope->count_of(which); }
POOCH void pooch_count_reset_most(Scope* scope) noexcept { scope->reset_most(); }
POOCH void pooch_count_end(Scope* scope) noexcept { scope->end_count(); }

POOCH void pooch_record_begin(Scope* scope) noexcept { scope->begin_record(this_thread(), state.next_id.load()); }
POOCH void pooch_record_mark(Scope* scope, int64_t value) noexcept { scope->mark(value); }
POOCH int64_t pooch_record_end(Scope* scope) noexcept { return scope->end_record(); }
POOCH void pooch_record_take(Scope* scope, pooch::Event* out, int64_t count) noexcept { scope->take_events(out, count); }

// Null if there is no memory or address space.
POOCH Arena* pooch_arena_new(int64_t size_bytes) noexcept {
  try {
    auto* arena = new Arena(size_bytes);
    state.arenas.add(arena);
    if (arena->map()) return arena;
    arena->drop();
  } catch (const std::bad_alloc&) {
  }
  return nullptr;
}
// 0 if a step is being served, the arena was dropped or there is no memory: then the places do not change.
POOCH int pooch_arena_lay_out(Arena* arena, int64_t count, const int64_t* sizes, const int64_t* offsets,
                              const int64_t* points, int64_t smallest_bytes, int64_t kept_bytes) noexcept {
  try {
    return arena->lay_out({count, sizes, offsets, points}, smallest_bytes, kept_bytes);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}
// 0 if the arena was dropped.
POOCH int pooch_arena_begin(Arena* arena, int64_t point) noexcept {
  const int64_t step_number = arena->begin(point);
  if (step_number < 0) return 0;
  here.arena = arena;
  here.step_number = step_number;
  return 1;
}
POOCH void pooch_arena_at(Arena* arena, int64_t point) noexcept { arena->at(point); }
POOCH void pooch_arena_fill_gaps(Arena* arena) noexcept {
  try {
    arena->fill_gaps();
  } catch (const std::bad_alloc&) { // then they come from the ordinary allocator
  }
}
// 0 if none is taken, or there is no memory for it.
POOCH int64_t pooch_arena_note(Arena* arena, const void* address) noexcept {
  try {
    return arena->note(address);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}
POOCH void* pooch_arena_again(Arena* arena, int64_t note, int64_t size_bytes) noexcept {
  return arena->again(note, size_bytes);
}
POOCH void pooch_arena_end(Arena* arena) noexcept {
  arena->end();
  leave(arena);
}
POOCH void pooch_arena_drop(Arena* arena) noexcept {
  leave(arena);
  arena->drop();
}
POOCH void pooch_arena_counts(Arena* arena, int64_t* out) noexcept { arena->counts(out); }
POOCH int64_t pooch_arena_misses(Arena* arena, pooch::Miss* out, int64_t most) noexcept { return arena->misses(out, most); }
POOCH int64_t pooch_arena_live_blocks(Arena* arena) noexcept { return arena->live_blocks(); }
POOCH int64_t pooch_arena_resident_bytes(Arena* arena) noexcept {
  try {
    return arena->resident_bytes();
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
POOCH int64_t pooch_arenas_mapped() noexcept { return Arena::mapped_count().load(); }

POOCH void pooch_pool_open(Scope* scope, int64_t limit_bytes, int64_t piece_bytes, int64_t least_bytes) noexcept {
  state.pool.open(scope, limit_bytes, static_cast<size_t>(piece_bytes), static_cast<size_t>(least_bytes));
}
POOCH void pooch_pool_close() noexcept { state.pool.close(); }
POOCH void pooch_pool_counts(int64_t* out) noexcept { state.pool.counts(out); }
POOCH void pooch_pool_reset_most() noexcept { state.pool.reset_most(); }
POOCH void pooch_pool_tell_to(void (*listener)(long)) noexcept { state.pool.tell_to(listener); }
