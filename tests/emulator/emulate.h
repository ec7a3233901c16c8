// Enough of CUDA to run verify.cu on a CPU, thread by thread: no GPU, no CUDA toolkit.
//
// Every thread of a block is a fiber. Warp-wide instructions wait for all 32 lanes, __syncthreads for all threads. Between
// such points warps run in an order drawn from the seed, and one of them last of all. An asynchronous copy spoils its target with NaN when it is issued
// and writes it no sooner than somebody waits for it: who reads too early, or copies over what is still read, gets NaN.
// Shared memory starts as NaN. Built with the address sanitizer, every read out of bounds ends the program.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <vector>

#define EMULATED 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define DYNAMIC_SHARED
#define __restrict__
using std::max;
using std::min;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class To, class From>
To bits(From x) { To y; static_assert(sizeof x == sizeof y, ""); memcpy(&y, &x, sizeof y); return y; }
inline float __int_as_float(int x) { return bits<float>(x); }
inline int __float_as_int(float x) { return bits<int>(x); }
inline int __ffs(unsigned x) { return ffs((int)x); }

struct Bfloat16 { uint16_t raw; };
struct Half { uint16_t raw; };
inline float widen(Bfloat16 x) { return bits<float>((uint32_t)x.raw << 16); }
inline float widen(Half x) { return (float)bits<_Float16>(x.raw); }
inline void narrow(Bfloat16& y, float x) {  // to nearest, ties to even
  uint32_t u = bits<uint32_t>(x);
  y.raw = x != x ? 0x7fff : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline void narrow(Half& y, float x) { y.raw = bits<uint16_t>((_Float16)x); }
#if USE_BF16 && !KV_E4M3
typedef Bfloat16 Operand;  // T of verify.cu
#else
typedef Half Operand;
#endif
inline float of_e4m3(unsigned x) {
  if ((x & 0x7f) == 0x7f) return NAN;
  float size = (x >> 3 & 15) ? ldexpf(1 + (x & 7) / 8.f, (int)(x >> 3 & 15) - 7) : ldexpf(x & 7, -9);
  return x & 0x80 ? -size : size;
}
inline uint32_t widen_e4m3(uint32_t x, bool high) {
  Half y[2];
  for (int i = 0; i < 2; ++i) narrow(y[i], of_e4m3(x >> (high * 16 + i * 8) & 0xff));
  return y[0].raw | (uint32_t)y[1].raw << 16;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t s) {
  uint64_t all = x | (uint64_t)y << 32;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= (uint32_t)(all >> (s >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
}

// ---- fibers ----

#ifdef __x86_64__
// swapcontext would ask the kernel for the signal mask, and the address sanitizer would sweep the whole stack, each time.
typedef void* Context;  // where the stack of who does not run ends, with all that it must find again
__attribute__((naked, noinline, no_sanitize_address)) void swap_stacks(Context* from, Context* to) {
  asm("push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15\n"
      "mov %rsp, (%rdi); mov (%rsi), %rsp\n"
      "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}
inline void prepare(Context& c, std::vector<char>& stack, void (*start)()) {
  uintptr_t top = ((uintptr_t)stack.data() + stack.size()) & ~(uintptr_t)15;
  void** at = (void**)top - 2;  // a function begins 8 bytes below a multiple of 16
  *at = (void*)start;
  c = at - 6;
}
#else
typedef ucontext_t Context;
inline void swap_stacks(Context* from, Context* to) { swapcontext(from, to); }
inline void prepare(Context& c, std::vector<char>& stack, void (*start)()) {
  getcontext(&c);
  c.uc_stack.ss_sp = stack.data();
  c.uc_stack.ss_size = stack.size();
  c.uc_link = nullptr;
  makecontext(&c, start, 0);
}
#endif

struct Dim { int x, y, z; };
enum State { READY, AT_WARP, AT_MEETING, AT_COPY, DONE };
struct Copy { void* to; const void* from; size_t bytes; };
struct Barrier { int arrivals, pending = arrivals; unsigned phase = 0; long bytes = 0; std::vector<Copy> copies = {}; };
struct Meeting { unsigned generation = 0; int arrived = 0, votes = 0, result = 0; };  // of a block, or of a named barrier
struct Fiber {
  Context context;
  State state = READY;
  unsigned seen = 0;                   // the generation of the barrier it waits for
  int meeting = 0;                     // AT_MEETING: at which
  std::function<bool()> arrived;       // AT_COPY
  std::vector<std::vector<Copy>> groups{1};  // cp.async: committed groups, then the open one
};
struct Warp { unsigned generation = 0; int arrived = 0; void* args[32]; };
struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Meeting meetings[16];
  unsigned met = 0;  // meetings that came about
  int alive = 0;
  std::map<const void*, Barrier> barriers;
};
static Block block;
static int current;
static Context scheduler;
static std::function<void()> body;
static Dim blockIdx, gridDim;
static std::mt19937 shuffle_engine;
struct ThreadIdx { struct { operator int() const { return current; } } x; };
static ThreadIdx threadIdx;

[[noreturn]] inline void fail(const char* why) {
  fprintf(stderr, "emulator: %s (block %d, %d, %d, thread %d)\n", why, blockIdx.x, blockIdx.y, blockIdx.z, current);
  exit(3);
}
inline Fiber& self() { return block.fibers[current]; }
inline void yield() { int me = current; swap_stacks(&block.fibers[me].context, &scheduler); }
inline void start() { body(); self().state = DONE; --block.alive; yield(); }

// All 32 lanes bring their arguments; the last to come does the work for all.
template <class Work>
inline void warp_wide(void* args, Work work) {
  Warp& w = block.warps[current / 32];
  w.args[current % 32] = args;
  if (++w.arrived == 32) {
    w.arrived = 0;
    ++w.generation;
    work(w.args);
    return;
  }
  self().seen = w.generation;
  self().state = AT_WARP;
  yield();
}

inline int come_together(int barrier, int threads, int vote) {
  Meeting& m = block.meetings[barrier];
  m.votes |= vote != 0;
  if (++m.arrived == threads) {
    m.arrived = 0;
    m.result = m.votes;
    m.votes = 0;
    ++m.generation;
    ++block.met;
    return m.result;
  }
  self().seen = m.generation;
  self().meeting = barrier;
  self().state = AT_MEETING;
  yield();
  return m.result;
}
inline int __syncthreads_or(int vote) { return come_together(0, block.alive, vote); }
inline void meet(int barrier) { come_together(barrier, 128, 0); }
inline bool meet_or(int barrier, bool vote) { return come_together(barrier, 128, vote); }
inline void __syncthreads() { __syncthreads_or(0); }
inline void __syncwarp() { warp_wide(nullptr, [](void**) {}); }

template <class V>
V exchange(V value, int from) {
  struct Args { V value; int from; V got; } args{value, from, value};
  warp_wide(&args, [](void** all) {
    for (int i = 0; i < 32; ++i) {
      Args* a = (Args*)all[i];
      a->got = ((Args*)all[a->from & 31])->value;
    }
  });
  return args.got;
}
template <class V> V __shfl_sync(unsigned, V value, int from) { return exchange(value, from); }
template <class V> V __shfl_xor_sync(unsigned, V value, int with) { return exchange(value, (current % 32) ^ with); }

inline bool can_run(const Fiber& f, const Warp& w) {
  switch (f.state) {
    case READY: return true;
    case AT_WARP: return w.generation != f.seen;
    case AT_MEETING: return block.meetings[f.meeting].generation != f.seen;
    case AT_COPY: return f.arrived();
    default: return false;
  }
}

inline void run_block(int threads) {
  static std::vector<std::vector<char>> stacks;
  block.fibers = std::vector<Fiber>(threads);
  block.warps = std::vector<Warp>(threads / 32);
  block.barriers.clear();
  block.alive = threads;
  for (Meeting& m : block.meetings) m.arrived = m.votes = 0;
  for (int i = 0; i < threads; ++i) {
    Fiber& f = block.fibers[i];
    if ((int)stacks.size() <= i) stacks.emplace_back(1 << 16);
    prepare(f.context, stacks[i], start);
  }
  std::vector<int> order(threads / 32);
  for (int i = 0; i < threads / 32; ++i) order[i] = i;
  // One warp stands still until no other can move: who counts on its being quick is found out.
  unsigned drawn = block.met - 1;
  int held = 0;
  bool hold = true;
  while (block.alive) {
    bool moved = false;
    if (drawn != block.met) {
      drawn = block.met;
      held = (int)(shuffle_engine() % order.size());
      hold = true;
    }
    std::shuffle(order.begin(), order.end(), shuffle_engine);
    for (int w : order)
      for (bool again = !(hold && w == held); again;) {
        again = false;
        for (int lane = 0; lane < 32; ++lane) {
          Fiber& f = block.fibers[w * 32 + lane];
          if (!can_run(f, block.warps[w])) continue;
          f.state = READY;
          current = w * 32 + lane;
          swap_stacks(&scheduler, &f.context);
          moved = again = true;
        }
        if (shuffle_engine() % 8 == 0) break;  // let another warp overtake
      }
    if (!moved && !hold && block.alive) fail("threads wait for each other and none can go on");
    hold = hold && moved;
  }
}

// ---- instructions ----

struct Fragment { uint32_t* r; const uint16_t* row; };
template <bool TRANS>
inline void load_matrices(uint32_t (&r)[4], const void* p) {
  if ((uintptr_t)p % 16) fail("ldmatrix from an address that is no multiple of 16");
  Fragment args{r, (const uint16_t*)p};
  warp_wide(&args, [](void** all) {
    uint32_t got[32][4];
    for (int lane = 0; lane < 32; ++lane)
      for (int m = 0; m < 4; ++m) {
        uint16_t pair[2];
        for (int j = 0; j < 2; ++j) {
          int row = TRANS ? (lane % 4) * 2 + j : lane / 4, column = TRANS ? lane / 4 : (lane % 4) * 2 + j;
          pair[j] = ((Fragment*)all[m * 8 + row])->row[column];
        }
        got[lane][m] = pair[0] | (uint32_t)pair[1] << 16;
      }
    for (int lane = 0; lane < 32; ++lane) memcpy(((Fragment*)all[lane])->r, got[lane], 16);
  });
}
inline void ldmatrix(uint32_t (&r)[4], const void* p) { load_matrices<false>(r, p); }
inline void ldmatrix_trans(uint32_t (&r)[4], const void* p) { load_matrices<true>(r, p); }

inline float half_of(uint32_t pair, int j) { return widen(Operand{(uint16_t)(pair >> (16 * j))}); }
inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Args { float* c; const uint32_t* a; uint32_t b[2]; } args{c, a, {b0, b1}};
  warp_wide(&args, [](void** all) {
    float A[16][16], B[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Args* x = (Args*)all[lane];
      int g = lane / 4, t = lane % 4 * 2;
      for (int j = 0; j < 2; ++j) {
        A[g][t + j] = half_of(x->a[0], j);
        A[g + 8][t + j] = half_of(x->a[1], j);
        A[g][t + 8 + j] = half_of(x->a[2], j);
        A[g + 8][t + 8 + j] = half_of(x->a[3], j);
        B[t + j][g] = half_of(x->b[0], j);
        B[t + 8 + j][g] = half_of(x->b[1], j);
      }
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        float* out = ((Args*)all[lane])->c + i;
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = *out;
        for (int k = 0; k < 16; ++k) sum += (double)A[row][k] * B[k][column];
        *out = (float)sum;
      }
  });
}
inline float exp2_fast(float x) {
  float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.f : y;
}

// What the launch before wrote is there once somebody has waited for it.
static std::function<void()> launch_before;
inline void next_may_start() {}
inline void wait_for_launch_before() {
  if (launch_before) launch_before();
  launch_before = nullptr;
}

inline void issue(const Copy& c) { memset(c.to, 0xff, c.bytes); }
inline void finish(const Copy& c) { memcpy(c.to, c.from, c.bytes); }
inline void copy16(void* to, const void* from) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) fail("cp.async of an address that is no multiple of 16");
  Copy c{to, from, 16};
  issue(c);
  self().groups.back().push_back(c);
}
inline void commit() { self().groups.emplace_back(); }
inline void wait_for(size_t open) {
  auto& groups = self().groups;
  while (groups.size() > open + 1) {
    for (const Copy& c : groups.front()) finish(c);
    groups.erase(groups.begin());
  }
}
template <int NEWEST>
inline void wait_all_but() { wait_for(NEWEST); }

inline void barrier_init(unsigned long long* b, unsigned arrivals) { block.barriers[b] = Barrier{(int)arrivals}; }
inline void barrier_init_done() {}
inline Barrier& barrier_of(unsigned long long* b) {
  auto found = block.barriers.find(b);
  if (found == block.barriers.end()) fail("an mbarrier is used before it was initialised");
  return found->second;
}
inline void barrier_arrive(unsigned long long* b) {
  if (--barrier_of(b).pending < 0) fail("an mbarrier got more arrivals than its phase takes");
}
inline void barrier_expect(unsigned long long* b, unsigned bytes) {
  barrier_arrive(b);
  barrier_of(b).bytes += bytes;
}
inline void copy_bulk(void* to, const void* from, unsigned bytes, unsigned long long* b) {  // warp-wide, one copies
  if (current % 32) return;
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16) fail("a bulk copy that is no multiple of 16");
  Copy c{to, from, bytes};
  issue(c);
  barrier_of(b).copies.push_back(c);
}
inline void prefetch_bulk(const void*, unsigned) {}
inline void barrier_wait(unsigned long long* b, unsigned phase) {
  auto arrived = [b, phase] {
    Barrier& x = barrier_of(b);
    if ((x.phase & 1) != phase) return true;
    long ready = 0;
    for (const Copy& c : x.copies) ready += (long)c.bytes;
    if (x.pending > 0 || ready < x.bytes) return false;
    if (ready > x.bytes) fail("an mbarrier got more bytes than it was told to expect");
    for (const Copy& c : x.copies) finish(c);
    x = Barrier{x.arrivals, x.arrivals, x.phase + 1};
    return true;
  };
  if (arrived()) return;
  self().arrived = arrived;
  self().state = AT_COPY;
  yield();
}
