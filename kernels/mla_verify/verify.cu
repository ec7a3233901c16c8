// MLA verify attention over a split prefix, for every card from sm_80 to sm_121: mma.sync, ldmatrix, bulk copies with
// mbarriers (cp.async before sm_90).
//
// partial_R (R = 16, 32, 64): one block takes R query rows (a row is node * heads + head) of one request against one
//   piece of its prefix; blocks of 16 rows take the nodes of its draft tree. 8 warps and at most 100,840 B of shared memory:
//   one source fits the 101,376 B that sm_120 gives a block. Tiles of 16 tokens pass through a ring of four (of seven, for
//   e4m3; more where there are 16 rows): one gives V to the products of the tile before, one is worked on, the others are
//   on their way.
//     S = Q K^T   Q lives in registers as MMA fragments. Four groups of warps own 144 of the 576 columns each; the two
//                 warps of a group share out the tokens. The groups' sums meet in shared memory.
//     softmax     online, a quarter of it beside each quarter of P V.
//     O += P V    warp w owns columns 64 w of the 512. V is the K tile itself, read through ldmatrix.trans.
//   Every fragment is fetched one product ahead. Between two tiles all warps meet twice, back to back: scores are there,
//   scores are read. Everything else is free.
//   R = 64: warps 0 to 3 and 4 to 7, one of each on every scheduler, are two halves of 32 rows that share the ring alone.
//   Each meets its own at named barriers, so that one multiplies while the other waits; an mbarrier says when both have left
//   a stage. A warp of a half is a group of S and owns 128 columns of O. A block takes several pieces of the same rows, one after the other,
//   where there are more than multiprocessors: Q and the ring are filled once.
//   K rows are 1,152 B (576 B of e4m3) from any slot, a bulk copy each; a row's stride in shared memory is 16 B more, which
//   keeps ldmatrix free of bank conflicts.
// e4m3 K/V become fp16 in registers, exactly, and so does P; Q becomes fp16 times a power of two of its row and column
//   group, which is exact but for what is 2^37 times smaller than the largest.
// merge: joins a row's partial results; which are added to which depends on their number alone.
//
// Bits: a row's sums are taken in the same order whatever R is, and tile shapes never depend on the batch or the tree; a
// piece depends on nothing but the request's own prefix. Tree nodes are summed one by one in float32: a hidden node adds
// nothing, so siblings cannot move a bit.
//
// tests/emulator runs this file on a CPU, thread by thread. plans/0002 has what each version changed and measured.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef EMULATED
#define DYNAMIC_SHARED extern __shared__ __align__(128) unsigned char raw[];
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef __half Half;
typedef __nv_bfloat16 Bfloat16;
__device__ __forceinline__ float widen(Bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(Half x) { return __half2float(x); }
__device__ __forceinline__ void narrow(Bfloat16& y, float x) { y = __float2bfloat16(x); }
__device__ __forceinline__ void narrow(Half& y, float x) { y = __float2half(x); }
#if USE_BF16 && !KV_E4M3
#define MMA_TYPE "bf16"
#else
#define MMA_TYPE "f16"
#endif
#define BULK (__CUDA_ARCH__ >= 900)

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)));
}
__device__ __forceinline__ void ldmatrix_trans(u32 (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)));
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#if KV_E4M3
// Two e4m3 in the low or the high half of x, as two fp16.
__device__ __forceinline__ u32 widen_e4m3(u32 x, bool high) {
  u32 y;
  asm volatile("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((unsigned short)(high ? x >> 16 : x)));
  return y;
}
#endif
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int NEWEST>
__device__ __forceinline__ void wait_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory"); }
// Once every block of this launch has said so or ended, blocks of the next may start, which then wait for all that this one
// wrote. Said late: said first thing in a block, it cost more than it gained wherever the merge has many blocks (plans/0002).
__device__ __forceinline__ void next_may_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#if BULK
__device__ __forceinline__ void barrier_init(u64* b, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* b) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// 128 threads meet at a barrier of their own; whether one of them votes.
__device__ __forceinline__ void meet(int barrier) { asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ bool meet_or(int barrier, bool vote) {
  int any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.b32 %0, 1, 0, q;\n}"
               : "=r"(any) : "r"((int)vote), "r"(barrier) : "memory");
  return any;
}
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* b, u32 phase) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
               ::"r"(shared_address(b)), "r"(phase) : "memory");
}
// A warp brings the same arguments and one of its lanes copies. The compiler then knows that the operands, which the
// instruction takes from uniform registers, are one warp's: otherwise it walks over the lanes. To shared::cluster, which
// CUDA before 12.8 knows alone, ptxas for sm_100 to 121 asks before each copy whose block the address is, and may call a function.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
#define OWN_SHARED "shared::cta"
#else
#define OWN_SHARED "shared::cluster"
#endif
__device__ __forceinline__ void copy_bulk(void* to, const void* from, u32 bytes, u64* b) {
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\n"
               "@p cp.async.bulk." OWN_SHARED ".global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)) : "memory");
}
#endif
#endif

typedef INDEX_TYPE Index;
// Q: queries and output. T: what the tensor cores multiply. KV: what the pool holds.
#if USE_BF16
typedef Bfloat16 Q;
#else
typedef Half Q;
#endif
#if KV_E4M3
typedef Half T;
typedef unsigned char KV;
__device__ __forceinline__ float value(KV x) {
  const u32 both = widen_e4m3(x, false);
  return widen(*reinterpret_cast<const Half*>(&both));
}
#else
typedef Q T;
typedef T KV;
__device__ __forceinline__ float value(KV x) { return widen(x); }
#endif
__device__ __forceinline__ float2 pair(u32 x) {
  const Q* y = reinterpret_cast<const Q*>(&x);
  return make_float2(widen(y[0]), widen(y[1]));
}

constexpr int KEYS = 16, DIM = 576, LATENT = 512, THREADS = 256;
constexpr int CHUNK = 16 / sizeof(KV), ROW_CHUNKS = DIM / CHUNK;  // 16 B: elements of one, and how many a row has
constexpr int K_STRIDE = DIM + CHUNK;  // elements
constexpr int P_STRIDE = KEYS + 8;
constexpr int MAX_NODES = 128, TREE_TILES = 2;  // tiles of a tree's nodes in the ring; its exponentials lie behind them
constexpr int GROUPS = 4, GROUP_COLUMNS = DIM / GROUPS, GROUP_STEPS = GROUP_COLUMNS / 16;
#define NEG_INF __int_as_float(0xff800000)

template <int ROWS>
struct Shared {
  static constexpr int STAGES = ROWS == 16 ? 10 / sizeof(KV) : sizeof(KV) == 1 ? 7 : 4;
  static constexpr int AHEAD = STAGES - 2;  // tiles on their way while one is worked on and one is V
  KV k[STAGES][KEYS][K_STRIDE];
  float s[GROUPS][ROWS][KEYS];  // chunks of 4 tokens, swizzled: see chunk()
  T p[2][ROWS][P_STRIDE];
  float row[2][ROWS];
  float q_scale[GROUPS][sizeof(KV) == 1 ? ROWS : 1];  // what Q was divided by
  u64 full[STAGES];
  u64 empty[ROWS == 64 ? STAGES : 1];  // both halves have left the stage
  // What the loop of 64 rows has no registers for.
  const Index* own;
  float total[ROWS == 64 ? THREADS : 1][2];  // each thread's sums of exponentials
};
static_assert(sizeof(Shared<64>) <= 101376, "sm_120 gives a block 101,376 B");
static_assert(sizeof(Shared<16>) <= 101376, "sm_120 gives a block 101,376 B");
static_assert(sizeof(Shared<64>) == SHARED_BYTES_64 && sizeof(Shared<16>) == SHARED_BYTES_16, "Variant.struct_bytes in cuda_kernels.py differs");
static_assert(MAX_NODES * 21 * sizeof(float) <= sizeof(KV) * (Shared<16>::STAGES - TREE_TILES) * KEYS * K_STRIDE, "a tree fits the ring");

// Which warp does what. S = Q K^T: 32 rows (16 where there are no more) x 16 tokens at R = 64, x 8 tokens below.
// O += P V: its 16-row steps of all rows (of its half's at R = 64), and a share of the columns.
template <int ROWS>
struct Part {
  static constexpr int M = ROWS == 16 ? 1 : 2;    // 16-row steps of a warp
  static constexpr int NS = ROWS == 64 ? 2 : 1;   // 8-token steps of a warp
  static constexpr int COLUMNS = ROWS == 64 ? 128 : 64, QUARTERS = COLUMNS / 16;  // of O
};
template <int ROWS>
__device__ __forceinline__ int group_of(int warp) { return ROWS == 64 ? warp & 3 : warp >> 1; }
// The first row and token of a warp's part of S.
template <int ROWS>
__device__ __forceinline__ int rows_from(int warp) { return ROWS == 64 ? (warp >> 2) * 32 : 0; }
template <int ROWS>
__device__ __forceinline__ int tokens_from(int warp) { return ROWS == 64 ? 0 : (warp & 1) * 8; }

// The same number, of which the compiler does not know where it comes from: what follows from it is worked out anew in
// each turn of a loop, in place of being kept in registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Where the 4 tokens of chunk c of a row lie: stores of 8 rows x 2 tokens a thread then hit every bank once.
__device__ __forceinline__ int chunk(int row, int c) { return (c ^ (row & 2)) * 4; }

__device__ __forceinline__ int piece_tokens(int prefix, int max_splits, int min_split) {
  int each = (prefix + max_splits - 1) / max_splits;
  each = (each + KEYS - 1) / KEYS * KEYS;
  return each > min_split ? each : min_split;
}

// Warp w brings rows 2 w and 2 w + 1 of a tile. Of a token past the end, the last one's again: its score is masked, and 0
// times what a real row holds is 0; what else lay there might be NaN.
struct Pair {
  int a, b;
};
__device__ __forceinline__ Pair slots_of(const Index* own, int token, int last) {
  constexpr int WORDS = sizeof(Index) / 4;  // a pool has fewer than 2^31 slots: the low half says it all
  const int* low = reinterpret_cast<const int*>(own);
  return {low[min(token, last) * WORDS], low[min(token + 1, last) * WORDS]};
}
// By cp.async.
__device__ __forceinline__ void load_tile(KV (*tile)[K_STRIDE], const KV* kv, Pair slots, int warp, int lane) {
  const KV* a = kv + (i64)slots.a * DIM;
  const KV* b = kv + (i64)slots.b * DIM - DIM;
#pragma unroll
  for (int c = lane; c < 2 * ROW_CHUNKS; c += 32)
    copy16(tile[warp * 2] + c * CHUNK + (c < ROW_CHUNKS ? 0 : K_STRIDE - DIM), (c < ROW_CHUNKS ? a : b) + c * CHUNK);
}
#if BULK
// By one bulk copy a row.
__device__ __forceinline__ void load_tile_bulk(KV (*tile)[K_STRIDE], u64* full, const KV* kv, Pair slots, int warp, int lane) {
  if (warp == 0 && lane == 0) barrier_expect(full, KEYS * DIM * (u32)sizeof(KV));
  copy_bulk(tile[warp * 2], kv + (i64)slots.a * DIM, DIM * sizeof(KV), full);
  copy_bulk(tile[warp * 2 + 1], kv + (i64)slots.b * DIM, DIM * sizeof(KV), full);
}
#endif

// S = Q K^T for a tile: this warp's part of it, summed over its 144 columns, to shared memory. The next fragment of K is
// always on its way.
template <int ROWS>
struct Keys {
  // An ldmatrix brings four 8 x 16 B blocks: 8 tokens x a k-step of e4m3, or x half a k-step of the wider types.
  static constexpr int PARTS = sizeof(KV) == 1 ? 1 : 2, STEPS = 4 / PARTS / Part<ROWS>::NS;
  static constexpr int LOADS = (GROUP_STEPS + STEPS - 1) / STEPS;
  u32 b[2][4];
};
template <int ROWS>
__device__ __forceinline__ int keys_offset(int warp, int lane) {
  constexpr int PARTS = Keys<ROWS>::PARTS, NS = Part<ROWS>::NS;
  const int block = lane >> 3, part = block % PARTS, n_of = block / PARTS % NS, step_of = block / PARTS / NS;
  return (tokens_from<ROWS>(warp) + n_of * 8 + (lane & 7)) * K_STRIDE + group_of<ROWS>(warp) * GROUP_COLUMNS +
         step_of * 16 + part * 8;
}
template <int ROWS>
struct Sums {
  float s[Part<ROWS>::M][Part<ROWS>::NS][4];
};
template <int ROWS>
__device__ __forceinline__ void score_steps(Sums<ROWS>& sums, Keys<ROWS>& k, const KV* from, const u32 (&q)[Part<ROWS>::M][GROUP_STEPS][4], int begin, int end, int lane) {
  constexpr int M = Part<ROWS>::M, NS = Part<ROWS>::NS, STEPS = Keys<ROWS>::STEPS;
#pragma unroll
  for (int load = begin; load < end; ++load) {
    const int step = load * STEPS;
    if (step + STEPS < GROUP_STEPS) {
      // Where the last has fewer steps to bring than it could, it brings the first of them again.
      const int over = step + 2 * STEPS > GROUP_STEPS ? lane / 8 / Keys<ROWS>::PARTS / NS * 16 : 0;
      ldmatrix(k.b[(load + 1) & 1], from + (step + STEPS) * 16 - over);
    }
    const u32(&b)[4] = k.b[load & 1];
#pragma unroll
    for (int ahead = 0; ahead < STEPS; ++ahead) {
      if (step + ahead >= GROUP_STEPS) continue;
#pragma unroll
      for (int n = 0; n < NS; ++n) {
#if KV_E4M3
        const u32 both = b[ahead * NS + n], b0 = widen_e4m3(both, false), b1 = widen_e4m3(both, true);
#else
        const u32 b0 = b[(ahead * NS + n) * 2], b1 = b[(ahead * NS + n) * 2 + 1];
#endif
#pragma unroll
        for (int m = 0; m < M; ++m) mma(sums.s[m][n], q[m][step + ahead], b0, b1);
      }
    }
  }
}
template <int ROWS>
__device__ __forceinline__ void store_scores(Shared<ROWS>& sh, const Sums<ROWS>& sums, int warp, int lane) {
#pragma unroll
  for (int m = 0; m < Part<ROWS>::M; ++m)
#pragma unroll
    for (int n = 0; n < Part<ROWS>::NS; ++n) {
      const int row = rows_from<ROWS>(warp) + m * 16 + (lane >> 2);
      const int token = tokens_from<ROWS>(warp) + n * 8 + (lane & 3) * 2;
      float* to = &sh.s[group_of<ROWS>(warp)][row][chunk(row, token >> 2) + (token & 2)];
      *reinterpret_cast<float2*>(to) = make_float2(sums.s[m][n][0], sums.s[m][n][1]);
      *reinterpret_cast<float2*>(to + 8 * KEYS) = make_float2(sums.s[m][n][2], sums.s[m][n][3]);
    }
}
template <int ROWS>
__device__ __forceinline__ void scores(Shared<ROWS>& sh, const KV* from, const u32 (&q)[Part<ROWS>::M][GROUP_STEPS][4], int warp, int lane) {
  Keys<ROWS> keys;
  Sums<ROWS> sums = {};
  ldmatrix(keys.b[0], from);
  score_steps<ROWS>(sums, keys, from, q, 0, Keys<ROWS>::LOADS, lane);
  store_scores<ROWS>(sh, sums, warp, lane);
}

// A row's softmax is the work of 8 threads of two tokens each, or of 4 threads of two such pairs.
template <int ROWS>
struct Lane {
  static constexpr int PAIRS = ROWS == 64 ? 2 : 1, EACH = ROWS == 64 ? 4 : 8;  // pairs of a thread, threads of a row
};

template <int ROWS>
__device__ __forceinline__ void whole_scores(float (&x)[Lane<ROWS>::PAIRS * 2], const Shared<ROWS>& sh, int row, int sub, float scale) {
  constexpr int N = Lane<ROWS>::PAIRS * 2;
  const int at = N == 4 ? chunk(row, sub) : chunk(row, sub >> 1) + (sub & 1) * 2;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const float* from = &sh.s[g][row][at];
    float y[N];
    if (N == 4) *reinterpret_cast<float4*>(y) = *reinterpret_cast<const float4*>(from);
    else *reinterpret_cast<float2*>(y) = *reinterpret_cast<const float2*>(from);
#pragma unroll
    for (int j = 0; j < N; ++j) {
#if KV_E4M3
      y[j] *= sh.q_scale[g][row];  // a power of two: exact
#endif
      x[j] = g ? x[j] + y[j] : y[j];
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] *= scale;
}

// The pairs' sums in one fixed order: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
template <int ROWS>
__device__ __forceinline__ float row_sum(const float* pair) {
  float x = pair[0];
  if (Lane<ROWS>::PAIRS == 2) x += pair[Lane<ROWS>::PAIRS - 1];
#pragma unroll
  for (int d = 1; d < Lane<ROWS>::EACH; d <<= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// acc (a warp's rows x its columns) = acc * shrink + P V for a tile, 16 columns at a time. P and the first fragment of V
// are fetched before, the next fragment is always on its way.
template <int ROWS>
struct Output {
  float o[Part<ROWS>::M][Part<ROWS>::COLUMNS / 8][4];
};
template <int ROWS>
struct Values {
  u32 p[Part<ROWS>::M][4], v[2][4];
};
template <int ROWS>
__device__ __forceinline__ void first_values(Values<ROWS>& f, const T (*p)[P_STRIDE], const KV* from, int lane) {
#pragma unroll
  for (int m = 0; m < Part<ROWS>::M; ++m) ldmatrix(f.p[m], &p[m * 16 + (lane & 15)][(lane >> 4) * 8]);
  ldmatrix_trans(f.v[0], from);
}
template <int ROWS>
__device__ __forceinline__ void shrink_all(const float* row, Output<ROWS>& out, int lane) {
  auto& acc = out.o;
#pragma unroll
  for (int m = 0; m < Part<ROWS>::M; ++m) {
    const float a = row[m * 16 + (lane >> 2)], b = row[m * 16 + 8 + (lane >> 2)];
#pragma unroll
    for (int n = 0; n < Part<ROWS>::COLUMNS / 8; ++n) {
      acc[m][n][0] *= a; acc[m][n][1] *= a; acc[m][n][2] *= b; acc[m][n][3] *= b;
    }
  }
}
template <int ROWS>
__device__ __forceinline__ void accumulate(Values<ROWS>& f, Output<ROWS>& out, const KV* from, int quarter) {
  constexpr int M = Part<ROWS>::M, QUARTERS = Part<ROWS>::QUARTERS;
  const int n = quarter * 2;
  auto& acc = out.o;
#if KV_E4M3
  // A block is 8 tokens x 16 B: twice as many columns, the even ones in one product, the odd in another.
  if (quarter % 2 == 0 && quarter + 2 < QUARTERS) ldmatrix_trans(f.v[(quarter / 2 + 1) & 1], from + (quarter + 2) * 16);
  const u32(&v)[4] = f.v[quarter / 2 & 1];
  const int c = quarter & 1;
  const u32 first = __byte_perm(v[c * 2], 0, 0x3120), second = __byte_perm(v[c * 2 + 1], 0, 0x3120);
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const u32 b0 = widen_e4m3(first, odd), b1 = widen_e4m3(second, odd);
#pragma unroll
    for (int m = 0; m < M; ++m) mma(acc[m][n + odd], f.p[m], b0, b1);
  }
#else
  if (quarter + 1 < QUARTERS) ldmatrix_trans(f.v[(quarter + 1) & 1], from + (n + 2) * 8);
  const u32(&v)[4] = f.v[quarter & 1];
#pragma unroll
  for (int m = 0; m < M; ++m) mma(acc[m][n], f.p[m], v[0], v[1]);
#pragma unroll
  for (int m = 0; m < M; ++m) mma(acc[m][n + 1], f.p[m], v[2], v[3]);
#endif
}

// The last P V, with none after it: what the loops do beside the softmax of the next tile.
template <int ROWS>
__device__ __forceinline__ void last_values(Output<ROWS>& acc, const T (*p)[P_STRIDE], const float* row, const KV* v, bool rescale, int lane) {
  Values<ROWS> values;
  first_values<ROWS>(values, p, v, lane);
  if (rescale) shrink_all<ROWS>(row, acc, lane);
#pragma unroll
  for (int quarter = 0; quarter < Part<ROWS>::QUARTERS; ++quarter) accumulate<ROWS>(values, acc, v, quarter);
}

// This warp's rows and columns of Q as MMA fragments, in two steps: the loads, 16 B a thread where that can be, and what is
// made of them once they are there. Four threads of a row bring four chunks of 8 columns, of which each then takes two
// columns. e4m3 K comes with four neighbouring columns in a register, so there the columns of a k-step are dealt out in
// that order.
template <int ROWS>
struct Loads {
  u32 x[Part<ROWS>::M][2][GROUP_STEPS * 2];
};
template <int ROWS>
__device__ __forceinline__ void fetch_q(Loads<ROWS>& f, const Q* q, int rows, int warp, int lane) {
#pragma unroll
  for (int m = 0; m < Part<ROWS>::M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = rows_from<ROWS>(warp) + m * 16 + half * 8 + (lane >> 2);
      const Q* from = q + (i64)r * DIM + group_of<ROWS>(warp) * GROUP_COLUMNS;
      u32(&x)[GROUP_STEPS * 2] = f.x[m][half];
#if KV_E4M3
#pragma unroll
      for (int c = 0; c < GROUP_STEPS * 2; c += 2) {
        const uint2 y = r < rows ? *reinterpret_cast<const uint2*>(from + c * 8 + (lane & 3) * 4) : uint2{0u, 0u};
        x[c] = y.x, x[c + 1] = y.y;
      }
#else
      constexpr int WHOLE = GROUP_STEPS * 2 / 4 * 4;  // chunks that four threads take together
#pragma unroll
      for (int c = 0; c < WHOLE; c += 4) {
        const uint4 y = r < rows ? *reinterpret_cast<const uint4*>(from + (c + (lane & 3)) * 8) : uint4{0u, 0u, 0u, 0u};
        x[c] = y.x, x[c + 1] = y.y, x[c + 2] = y.z, x[c + 3] = y.w;
      }
#pragma unroll
      for (int c = WHOLE; c < GROUP_STEPS * 2; ++c)
        x[c] = r < rows ? *reinterpret_cast<const u32*>(from + c * 8 + (lane & 3) * 2) : 0u;
#endif
    }
}
// Four threads hold four numbers each: thread t gets the t-th of each.
__device__ __forceinline__ void transpose(u32* x, int lane) {
#pragma unroll
  for (int d = 1; d < 4; d <<= 1) {
    const bool upper = lane & d;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & d) continue;
      const u32 got = __shfl_xor_sync(~0u, upper ? x[i] : x[i + d], d);
      (upper ? x[i] : x[i + d]) = got;
    }
  }
}
template <int ROWS>
__device__ __forceinline__ void place_q(Shared<ROWS>& sh, u32 (&f)[Part<ROWS>::M][GROUP_STEPS][4], Loads<ROWS>& loads, int warp, int lane) {
#pragma unroll
  for (int m = 0; m < Part<ROWS>::M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32(&x)[GROUP_STEPS * 2] = loads.x[m][half];
#if KV_E4M3
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < GROUP_STEPS * 2; ++i) {
        const float2 y = pair(x[i]);
        most = fmaxf(most, fmaxf(fabsf(y.x), fabsf(y.y)));
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      // The largest comes to lie in [2^13, 2^14): no sum of two overflows, and nothing that matters falls off below.
      const int power = min(max((__float_as_int(most) >> 23) - 13, 1), 240);
      const float times = __int_as_float((254 - power) << 23);
#pragma unroll
      for (int i = 0; i < GROUP_STEPS * 2; ++i) {
        const float2 y = pair(x[i]);
        T both[2];
        narrow(both[0], y.x * times);
        narrow(both[1], y.y * times);
        x[i] = *reinterpret_cast<u32*>(both);
      }
      const int r = rows_from<ROWS>(warp) + m * 16 + half * 8 + (lane >> 2);
      if ((lane & 3) == 0 && tokens_from<ROWS>(warp) == 0) sh.q_scale[group_of<ROWS>(warp)][r] = __int_as_float(power << 23);
#else
#pragma unroll
      for (int c = 0; c + 4 <= GROUP_STEPS * 2; c += 4) transpose(&x[c], lane);
#endif
#pragma unroll
      for (int i = 0; i < GROUP_STEPS * 2; ++i) f[m][i / 2][half + i % 2 * 2] = x[i];
    }
}

// The draft tree for 16 rows. Scores of all nodes first, then a sum over each row's own ancestors, in their order. A block
// of its own for every 16 rows: short prefixes wait for nothing else.
__device__ __forceinline__ void tree_piece(
    Shared<16>& sh, const Q* q, const KV* kv, const Index* own, const u32* words, int width, int nodes, int first_row,
    int rows, int heads, float score_scale, float* part_out, float* part_lse, i64 step, int tid) {
  constexpr int STRIDE = 20, N = Lane<16>::PAIRS * 2;
  const int warp = tid >> 5, lane = tid & 31;
  const int my_row = tid / Lane<16>::EACH % 16, sub = tid % Lane<16>::EACH;
  const bool has_row = warp < 4;
  // Behind the first two tiles: exponentials [node][row], and which rows see a node.
  float* tree = reinterpret_cast<float*>(&sh.k[TREE_TILES][0][0]);
  u32* seen = reinterpret_cast<u32*>(tree + MAX_NODES * STRIDE);
  const u32* mine = words + (i64)(my_row < rows ? (first_row + my_row) / heads : 0) * width;
  if (rows > 16) rows = 16;
  int end = nodes;  // behind it nobody sees anything
  auto slots_at = [&](int at) { return slots_of(own, at + warp * 2, nodes - 1); };
  auto load = [&](int at, Pair slots) {
    if (at < end) load_tile(sh.k[at / KEYS & 1], kv, slots, warp, lane);
    commit();
  };
  // All that a block waits for at its beginning is on its way before it waits for any.
  const Pair one = slots_at(0), two = slots_at(KEYS);
  const int first_node = first_row / heads, last_node = (first_row + rows - 1) / heads;
  const bool is_node = tid < nodes;
  u32 word = is_node ? words[(i64)first_node * width + (tid >> 5)] : 0u;
  Loads<16> whole;
  fetch_q<16>(whole, q, rows, warp, lane);
  load(0, one);
  load(KEYS, two);
  if (tid < MAX_NODES) {
    u32 all = 0;
    for (int node = first_node; is_node && node <= last_node; ++node) {
      const int from = max(node * heads - first_row, 0), to = min((node + 1) * heads - first_row, rows);
      if (word >> (tid & 31) & 1u) all |= (1u << to) - (1u << from);
      if (node < last_node) word = words[(i64)(node + 1) * width + (tid >> 5)];
    }
    seen[tid] = all;
  }
  u32 qf[1][GROUP_STEPS][4];
  place_q<16>(sh, qf, whole, warp, lane);
  __syncthreads();
  for (bool any = false; end > KEYS; end = (end - 1) / KEYS * KEYS) {
    for (int j = (end - 1) / KEYS * KEYS; j < end; ++j) any |= seen[j] != 0;
    if (any) break;
  }
  float top = NEG_INF;
  for (int at = 0; at < end; at += KEYS) {
    wait_all_but<1>();
    __syncthreads();
    const KV* from = &sh.k[at / KEYS & 1][0][0] + keys_offset<16>(warp, lane);
    scores<16>(sh, from, qf, warp, lane);
    __syncthreads();
    load(at + 2 * KEYS, slots_at(at + 2 * KEYS));
    if (has_row) {
      float x[N];
      whole_scores<16>(x, sh, my_row, sub, score_scale);
      const u32 word = my_row < rows ? mine[at >> 5] >> (at & 31) : 0u;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int token = sub * N + j;
        x[j] = (word >> token) & 1u && at + token < nodes ? x[j] : NEG_INF;
        tree[(at + token) * STRIDE + my_row] = x[j];
        top = fmaxf(top, x[j]);
      }
    }
  }
#pragma unroll
  for (int d = 1; d < Lane<16>::EACH; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float base = top == NEG_INF ? 0.f : top;
  wait_all_but<0>();
  __syncthreads();
  if (end > 2 * KEYS) {
    load(0, slots_at(0));
    load(KEYS, slots_at(KEYS));
  }
  if (has_row) {
    for (int j = sub; j < end; j += Lane<16>::EACH) {
      float* x = &tree[j * STRIDE + my_row];
      *x = exp2_fast(*x - base);
    }
    __syncwarp();
    if (sub == 0) {
      float total = 0.f;
#pragma unroll 4
      for (int j = 0; j < end; ++j) total += tree[j * STRIDE + my_row];
      sh.row[0][my_row] = total == 0.f ? 0.f : 1.f / total;
      if (my_row < rows) part_lse[my_row * step] = total == 0.f ? NEG_INF : top + log2f(total);
    }
  }
  next_may_start();
  float acc[16][2] = {};
  for (int at = 0; at < end; at += KEYS) {
    wait_all_but<1>();
    __syncthreads();
    const KV* v = &sh.k[at / KEYS & 1][0][tid * 2];
    for (int j = at; j < min(at + KEYS, end); ++j, v += K_STRIDE) {
      // All threads take the same way here. A hidden node is left out, not multiplied by 0: its K/V may be anything.
      const u32 all = seen[j];
      if (!all) continue;
      const float a = value(v[0]), b = value(v[1]);
#pragma unroll
      for (int r = 0; r < 16; r += 4) {
        const float4 p = *reinterpret_cast<const float4*>(&tree[j * STRIDE + r]);
        if (all >> r & 1u) acc[r][0] = fmaf(p.x, a, acc[r][0]), acc[r][1] = fmaf(p.x, b, acc[r][1]);
        if (all >> r & 2u) acc[r + 1][0] = fmaf(p.y, a, acc[r + 1][0]), acc[r + 1][1] = fmaf(p.y, b, acc[r + 1][1]);
        if (all >> r & 4u) acc[r + 2][0] = fmaf(p.z, a, acc[r + 2][0]), acc[r + 2][1] = fmaf(p.z, b, acc[r + 2][1]);
        if (all >> r & 8u) acc[r + 3][0] = fmaf(p.w, a, acc[r + 3][0]), acc[r + 3][1] = fmaf(p.w, b, acc[r + 3][1]);
      }
    }
    if (end > 2 * KEYS) {
      __syncthreads();
      load(at + 2 * KEYS, slots_at(at + 2 * KEYS));
    } else {
      commit();
    }
  }
#pragma unroll
  for (int r = 0; r < 16; ++r)
    if (r < rows) {
      const float norm = sh.row[0][r];
      *reinterpret_cast<float2*>(part_out + r * step * LATENT + tid * 2) = make_float2(acc[r][0] * norm, acc[r][1] * norm);
    }
}

// What a warp has of O for one piece, divided by each row's sum, to its place among the partial results, 16 B a thread.
template <int ROWS>
__device__ __forceinline__ void store_output(const Output<ROWS>& out, const float* norms, float* to, i64 step, int first, int left, int lane) {
#pragma unroll
  for (int m = 0; m < Part<ROWS>::M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first + m * 16 + half * 8 + (lane >> 2);
      const float norm = r < left ? norms[r] : 0.f;
      float* row = to + r * step * LATENT;
      const auto& o = out.o[m];
      const int h = half * 2;
#pragma unroll
      for (int n = 0; n < Part<ROWS>::COLUMNS / 8; n += 2) {
#if KV_E4M3
        const float4 y = make_float4(o[n][h] * norm, o[n + 1][h] * norm, o[n][h + 1] * norm, o[n + 1][h + 1] * norm);
        float* at = row + n * 8 + (lane & 3) * 4;
#else
        // Two neighbours have two columns each of two chunks of 8: one takes the first chunk's four, the other the second's.
        const bool odd = lane & 1;
        const float a = __shfl_xor_sync(~0u, (odd ? o[n][h] : o[n + 1][h]) * norm, 1);
        const float b = __shfl_xor_sync(~0u, (odd ? o[n][h + 1] : o[n + 1][h + 1]) * norm, 1);
        const float c = (odd ? o[n + 1][h] : o[n][h]) * norm, d = (odd ? o[n + 1][h + 1] : o[n][h + 1]) * norm;
        const float4 y = odd ? make_float4(a, b, c, d) : make_float4(c, d, a, b);
        float* at = row + n * 8 + (odd ? 8 : 0) + (lane & 2) * 2;
#endif
        if (r < left) *reinterpret_cast<float4*>(at) = y;
      }
    }
}

// A row moves its base only when a score passes it by 2^8: P stays well within its dtype, and most tiles rescale nothing.
// The decision is the row's own, so its neighbours cannot move its bits.
__device__ __forceinline__ float new_base(float top, float higher) { return higher > top + 8.f ? higher : top; }

// 16 or 32 rows and one piece.
template <int ROWS>
__device__ __forceinline__ void one_piece(
    Shared<ROWS>& sh, const Q* q, const KV* kv, const Index* own, int tokens, int rows, float score_scale,
    float* part_out, float* part_lse, i64 step, int tid, int warp, int lane) {
  constexpr int N = Lane<ROWS>::PAIRS * 2, EACH = Lane<ROWS>::EACH;
  constexpr int STAGES = Shared<ROWS>::STAGES, AHEAD = Shared<ROWS>::AHEAD;
  auto load = [&](int i, int stage, Pair slots) {
#if BULK
    if (i * KEYS < tokens) load_tile_bulk(sh.k[stage], &sh.full[stage], kv, slots, warp, lane);
#else
    if (i * KEYS < tokens) load_tile(sh.k[stage], kv, slots, warp, lane);
    commit();
#endif
  };
  Pair slots[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) slots[i] = slots_of(own, i * KEYS + warp * 2, tokens - 1);
#if BULK
  if (tid < STAGES) barrier_init(&sh.full[tid], 1);
  barrier_init_done();
#endif
  Loads<ROWS> whole;
  fetch_q<ROWS>(whole, q, rows, warp, lane);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) load(i, i, slots[i]);
  Pair next = slots_of(own, AHEAD * KEYS + warp * 2, tokens - 1);
  u32 qf[Part<ROWS>::M][GROUP_STEPS][4];
  place_q<ROWS>(sh, qf, whole, warp, lane);

  // 16 rows are the work of four warps; the others do it too, and keep it to themselves.
  const int my_row = tid / EACH % ROWS, sub = tid % EACH;
  const bool has_row = ROWS > 16 || warp < 4;
  Output<ROWS> acc = {};
  float top = NEG_INF, total = 0.f;
  bool shrunk = false;
  const int k_offset = keys_offset<ROWS>(warp, lane);
  const int v_offset = (lane & 15) * K_STRIDE + warp * 64 + (lane >> 4) * CHUNK;
  // Tile 0 has none before it: its turn multiplies its own V by zeros.
  for (int c = tid; c < ROWS * P_STRIDE / 2; c += THREADS) reinterpret_cast<u32*>(&sh.p[1][0][0])[c] = 0u;
#if BULK
  barrier_wait(&sh.full[0], 0);
#else
  wait_all_but<AHEAD - 1>();
#endif
  __syncthreads();
  scores<ROWS>(sh, &sh.k[0][0][0] + k_offset, qf, warp, lane);
  int v_stage = 0, k_stage = 1;  // of tile i - 1 (of tile 0 while there is none) and of tile i + 1
  u32 k_phase = 0;
  for (int i = 0; i * KEYS < tokens; ++i) {
#if !BULK
    wait_all_but<AHEAD - 2>();  // tile i + 1
#endif
    // Here: S of tile i, P of tile i - 1. Nobody reads tile i - 2 any more.
    const bool rescale = __syncthreads_or(shrunk);
    float x[N];
    whole_scores<ROWS>(x, sh, my_row, sub, score_scale);
    __syncthreads();
    // From here to the end of the turn nothing waits for another warp.
    const KV* v = &sh.k[v_stage][0][0] + v_offset;
    const KV* k = &sh.k[k_stage][0][0] + k_offset;
    Values<ROWS> values;
    float higher, shrink;
    T packed[N];
    const int stage = k_stage + AHEAD - 1;
    load(i + AHEAD, stage < STAGES ? stage : stage - STAGES, next);
    next = slots_of(own, (i + AHEAD + 1) * KEYS + warp * 2, tokens - 1);
    first_values<ROWS>(values, sh.p[(i - 1) & 1], v, lane);
    if (rescale) shrink_all<ROWS>(sh.row[(i - 1) & 1], acc, lane);
#if BULK
    if ((i + 1) * KEYS < tokens) barrier_wait(&sh.full[k_stage], k_phase);
#endif
    // S of the tile after (after the last: of what lies in the ring, which nobody reads), P V of the tile before, and this
    // tile's softmax, a quarter of each at a time: none waits for itself.
    constexpr int LOADS = Keys<ROWS>::LOADS;
    Keys<ROWS> keys;
    Sums<ROWS> sums = {};
    ldmatrix(keys.b[0], k);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      score_steps<ROWS>(sums, keys, k, qf, LOADS * quarter / 4, LOADS * (quarter + 1) / 4, lane);
      accumulate<ROWS>(values, acc, v, quarter);
      if (quarter == 0) {
        const int left = tokens - i * KEYS - sub * N;
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = left > j ? x[j] : NEG_INF;
        higher = fmaxf(x[0], x[1]);
        higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
      } else if (quarter == 1) {
#pragma unroll
        for (int d = 2; d < EACH; d <<= 1) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, d));
        const float base = new_base(top, higher);
        shrink = exp2_fast(top - base);
        top = base;
      } else if (quarter == 2) {
        const float a = exp2_fast(x[0] - top), b = exp2_fast(x[1] - top);
        total = total * shrink + (a + b);
        narrow(packed[0], a);
        narrow(packed[1], b);
      } else {
        if (has_row) {
          *reinterpret_cast<u32*>(&sh.p[i & 1][my_row][sub * N]) = *reinterpret_cast<u32*>(packed);
          if (sub == 0) sh.row[i & 1][my_row] = shrink;
        }
        shrunk = shrink != 1.f;
      }
    }
    store_scores<ROWS>(sh, sums, warp, lane);
    if (i > 0) v_stage = v_stage + 1 < STAGES ? v_stage + 1 : 0;
    k_phase ^= k_stage + 1 == STAGES;
    k_stage = k_stage + 1 < STAGES ? k_stage + 1 : 0;
  }
  next_may_start();
  const int last = (tokens - 1) / KEYS & 1;
  const bool rescale = __syncthreads_or(shrunk);
  last_values<ROWS>(acc, sh.p[last], sh.row[last], &sh.k[v_stage][0][0] + v_offset, rescale, lane);
  __syncthreads();
  const float all = row_sum<ROWS>(&total);
  if (has_row && sub == 0) {
    sh.row[1][my_row] = 1.f / all;
    if (my_row < rows) part_lse[my_row * step] = top + log2f(all);
  }
  __syncthreads();
  store_output<ROWS>(acc, sh.row[1], part_out + warp * 64, step, 0, rows, lane);
}

// Tiles of a block's pieces, one after the other: ``each`` tokens, then ``skip`` that are other blocks'.
struct Walk {
  int at, end;
  __device__ __forceinline__ void next(int each, int skip, int prefix) {
    at += KEYS;
    if (at >= end) at = end + skip, end = min(at + each, prefix);
  }
};

// 64 rows and every ``places``-th piece, by two halves of 32 rows.
__device__ __forceinline__ void many_pieces(
    Shared<64>& sh, const Q* q, const KV* kv, const Index* own, int prefix, int each, int place, int places, int rows,
    float score_scale, float* part_out, float* part_lse, i64 step, int tid, int warp, int lane) {
  constexpr int STAGES = Shared<64>::STAGES, AHEAD = Shared<64>::AHEAD;
  const int half = warp >> 2, skip = (places - 1) * each;
#if BULK
  auto sync = [&] { meet(1 + half); };
  auto sync_or = [&](bool vote) { return meet_or(1 + half, vote); };
#else
  // cp.async is waited for by who issued it, so every tile is a meeting of all.
  auto sync = [&] { __syncthreads(); };
  auto sync_or = [&](bool vote) { return (bool)__syncthreads_or(vote); };
#endif
  Walk loads = {place * each, min((place + 1) * each, prefix)};
  if (tid == 0) sh.own = own;
  auto load = [&](int stage, Pair slots) {
#if BULK
    load_tile_bulk(sh.k[stage], &sh.full[stage], kv, slots, warp, lane);
#else
    load_tile(sh.k[stage], kv, slots, warp, lane);
#endif
  };
#if BULK
  if (tid < STAGES) {
    barrier_init(&sh.full[tid], 1);
    barrier_init(&sh.empty[tid], THREADS);
  }
  barrier_init_done();
#endif
  Pair first[AHEAD];
  Walk walk = loads;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    first[i] = slots_of(own, walk.at + warp * 2, prefix - 1);
    walk.next(each, skip, prefix);
  }
  Loads<64> whole;
  fetch_q<64>(whole, q, rows, warp, lane);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    if (loads.at < prefix) load(i, first[i]);
#if !BULK
    commit();
#endif
    loads.next(each, skip, prefix);
  }
  Pair slots = slots_of(own, loads.at + warp * 2, prefix - 1);
  u32 qf[2][GROUP_STEPS][4];
  place_q<64>(sh, qf, whole, warp, lane);

  const int my_row = tid >> 2, sub = tid & 3;
  float* total = sh.total[tid];
  const int k_offset = keys_offset<64>(warp, lane);
  const int v_offset = (lane & 15) * K_STRIDE + group_of<64>(warp) * 128 + (lane >> 4) * CHUNK;
  int stage = 0;  // of the next tile whose scores are due
  u32 phase = 0;
  for (int from = place * each; from < prefix; from += places * each) {
    const int tokens = min(each, prefix - from);
    Output<64> acc = {};
    float top = NEG_INF;
    total[0] = total[1] = 0.f;
    bool shrunk = false;
    int v_stage = stage;  // of the tile before: the first has none, its turn multiplies its own V by zeros
    auto next_scores = [&] {
#if BULK
      barrier_wait(&sh.full[stage], phase);
#endif
      scores<64>(sh, &sh.k[stage][0][0] + k_offset, qf, warp, sizeof(KV) == 1 ? opaque(lane) : lane);
      phase ^= stage + 1 == STAGES;
      stage = stage + 1 < STAGES ? stage + 1 : 0;
    };
    *reinterpret_cast<uint2*>(&sh.p[1][my_row][sub * 4]) = uint2{0u, 0u};
#if !BULK
    wait_all_but<AHEAD - 1>();
    __syncthreads();
#endif
    next_scores();
    for (int i = 0; i * KEYS < tokens; ++i) {
#if !BULK
      wait_all_but<AHEAD - 2>();  // the next tile
#endif
      const bool rescale = sync_or(shrunk);  // here: S of this tile, P of the tile before
      float x[4];
      whole_scores<64>(x, sh, my_row, sub, score_scale);
      sync();
      if (loads.at < prefix) {
        const int to = stage + AHEAD - 1 < STAGES ? stage + AHEAD - 1 : stage + AHEAD - 1 - STAGES;
#if BULK
        // Until both halves have left what lay there. At first this asks for the phase before a new barrier's: nobody waits.
        barrier_wait(&sh.empty[to], phase ^ (to < stage) ^ 1);
#endif
        load(to, slots);
        loads.next(each, skip, prefix);
        slots = slots_of(sh.own, loads.at + opaque(warp) * 2, prefix - 1);
      } else {
        next_may_start();
      }
#if !BULK
      commit();
#endif
      const KV* v = &sh.k[v_stage][0][0] + v_offset;
      Values<64> values;
      first_values<64>(values, sh.p[(i - 1) & 1] + half * 32, v, lane);
      if (rescale) shrink_all<64>(sh.row[(i - 1) & 1] + half * 32, acc, lane);
      float higher, shrink;
      T packed[4];
#pragma unroll
      for (int quarter = 0; quarter < Part<64>::QUARTERS; ++quarter) {
        accumulate<64>(values, acc, v, quarter);
        if (quarter == 0) {
          const int left = tokens - i * KEYS - sub * 4;
#pragma unroll
          for (int j = 0; j < 4; ++j) x[j] = left > j ? x[j] : NEG_INF;
          higher = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
          higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
        } else if (quarter == 2) {
          higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
          const float base = new_base(top, higher);
          shrink = exp2_fast(top - base);
          top = base;
        } else if (quarter == 4) {
#pragma unroll
          for (int j = 0; j < 4; j += 2) {
            const float a = exp2_fast(x[j] - top), b = exp2_fast(x[j + 1] - top);
            total[j / 2] = total[j / 2] * shrink + (a + b);
            narrow(packed[j], a);
            narrow(packed[j + 1], b);
          }
        } else if (quarter == 6) {
          *reinterpret_cast<uint2*>(&sh.p[i & 1][my_row][sub * 4]) = *reinterpret_cast<uint2*>(packed);
          if (sub == 0) sh.row[i & 1][my_row] = shrink;
          shrunk = shrink != 1.f;
        }
      }
#if BULK
      if (i > 0) barrier_arrive(&sh.empty[v_stage]);
#endif
      if (i > 0) v_stage = v_stage + 1 < STAGES ? v_stage + 1 : 0;
      if ((i + 1) * KEYS < tokens) next_scores();
    }
    const int last = (tokens - 1) / KEYS & 1;
    const bool rescale = sync_or(shrunk);
    last_values<64>(acc, sh.p[last] + half * 32, sh.row[last] + half * 32, &sh.k[v_stage][0][0] + v_offset, rescale, lane);
#if BULK
    barrier_arrive(&sh.empty[v_stage]);
#endif
    const float all = row_sum<64>(total);
    sync();
    const i64 piece = opaque(from) / each;
    if (sub == 0) {
      sh.row[1][my_row] = 1.f / all;
      if (my_row < rows) part_lse[my_row * step + piece] = top + log2f(all);
    }
    sync();
    store_output<64>(acc, sh.row[1], part_out + piece * LATENT + group_of<64>(warp) * 128, step, half * 32, rows, lane);
  }
}

template <int ROWS>
__device__ __forceinline__ void partial(
    unsigned char* raw, const Q* q, const KV* kv, const Index* indices, const i64* starts, const int* lens,
    const u32* words, const int* node_starts, float* part_out, float* part_lse, float score_scale, int first_request,
    int first_block, int heads, int max_rows, int splits, int width, int max_splits, int min_split) {
  constexpr int TREES = ROWS / 16;
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0), lane = tid & 31;  // thus known to be a warp's
  const int request = first_request + blockIdx.z, place = (int)blockIdx.y - TREES;
  const i64 start = starts[request];
  const int first_node = node_starts[request], nodes = node_starts[request + 1] - first_node;
  const int prefix = lens[request] - nodes;
  const int tree_row = place < 0 ? blockIdx.y * 16 : 0;
  const int first_row = (first_block + blockIdx.x) * ROWS + tree_row, rows = nodes * heads - first_row;
  if (rows <= 0 || prefix < 0) return;
  q += ((i64)first_node * heads + first_row) * DIM;
  const i64 step = splits + 1, part = ((i64)blockIdx.z * max_rows + blockIdx.x * ROWS + tree_row) * step;
  indices += start;
  if (place < 0) {
    tree_piece(*reinterpret_cast<Shared<16>*>(raw), q, kv, indices + prefix, words + (i64)first_node * width, width, nodes,
               first_row, rows, heads, score_scale, part_out + part * LATENT, part_lse + part, step, tid);
    return;
  }
  const int each = piece_tokens(prefix, max_splits, min_split);
  if ((i64)place * each >= prefix) return;
  Shared<ROWS>& sh = *reinterpret_cast<Shared<ROWS>*>(raw);
  if constexpr (ROWS == 64)
    many_pieces(sh, q, kv, indices, prefix, each, place, gridDim.y - TREES, rows, score_scale,
                part_out + (part + 1) * LATENT, part_lse + part + 1, step, tid, warp, lane);
  else
    one_piece<ROWS>(sh, q, kv, indices + (i64)place * each, min(each, prefix - place * each), rows, score_scale,
                    part_out + (part + place + 1) * LATENT, part_lse + part + place + 1, step, tid, warp, lane);
}

// grid (row blocks, ROWS / 16 + splits, requests); of 64 rows as few as one block for all splits. part_out [requests, max_rows, splits + 1, 512] takes normalised float32,
// part_lse [requests, max_rows, splits + 1] its log2-sum-exp2; index 0 is the tree.
#define PARTIAL(ROWS)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) partial_##ROWS(                                                \
      const Q* __restrict__ q, const KV* __restrict__ kv, const Index* __restrict__ indices,                             \
      const i64* __restrict__ starts, const int* __restrict__ lens, const u32* __restrict__ words,                       \
      const int* __restrict__ node_starts, float* __restrict__ part_out, float* __restrict__ part_lse,                   \
      float score_scale, int first_request, int first_block, int heads, int max_rows, int splits, int width,             \
      int max_splits, int min_split) {                                                                                   \
    DYNAMIC_SHARED                                                                                                       \
    partial<ROWS>(raw, q, kv, indices, starts, lens, words, node_starts, part_out, part_lse, score_scale, first_request,  \
                  first_block, heads, max_rows, splits, width, max_splits, min_split);                                   \
  }
PARTIAL(16)
PARTIAL(32)
PARTIAL(64)
// grid (rows, requests, 4), 256 threads: a block joins 128 columns of a row; 16 groups of threads take every 16th partial
// result, two times 4 columns a thread. Partial results are not __restrict__: they are no constants, for a block may start before
// they are there.
constexpr int MERGE_COLUMNS = 128, MERGE_EARLY = 2, MERGE_GROUPS = 16, MOST_PIECES = 512;
extern "C" __global__ void __launch_bounds__(256) merge(
    const float* part_out, const float* part_lse, const int* __restrict__ lens,
    const int* __restrict__ node_starts, Q* __restrict__ out, float* __restrict__ lse_out, float kv_scale,
    int first_request, int first_row, int heads, int max_rows, int splits, int max_splits, int min_split) {
  __shared__ float weight[MOST_PIECES];
  __shared__ float sums[MERGE_GROUPS][MERGE_COLUMNS];
  __shared__ float whole;
  const int tid = threadIdx.x, request = first_request + blockIdx.y, row = first_row + blockIdx.x;
  const int first_node = node_starts[request], nodes = node_starts[request + 1] - first_node;
  const int prefix = lens[request] - nodes, first_column = blockIdx.z * MERGE_COLUMNS;
  if (row >= nodes * heads) return;
  const i64 to = (i64)first_node * heads + row;
  if (prefix < 0) {
    if (tid < MERGE_COLUMNS) narrow(out[to * LATENT + first_column + tid], 0.f);
    if (tid == 0 && first_column == 0) lse_out[to] = NEG_INF;
    return;
  }
  const int each = piece_tokens(prefix, max_splits, min_split);
  const int count = min((prefix + each - 1) / each, splits) + 1;
  const i64 base = ((i64)blockIdx.y * max_rows + blockIdx.x) * (splits + 1);
  const int group = tid >> 4, column = (tid & 15) * 4;
  const float* from = part_out + base * LATENT + first_column + column;
  auto fetch = [&](int i, int half) { return *reinterpret_cast<const float4*>(from + (i64)i * LATENT + half * (MERGE_COLUMNS / 2)); };
  wait_for_launch_before();
  // What does not depend on the weights is on its way before they are there.
  float4 early[MERGE_EARLY][2];
#pragma unroll
  for (int k = 0; k < MERGE_EARLY; ++k)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      early[k][half] = group + k * MERGE_GROUPS < count ? fetch(group + k * MERGE_GROUPS, half) : float4{};
  if (tid < 32) {
    float top = NEG_INF, total = 0.f;
    for (int i = tid; i < count; i += 32) top = fmaxf(top, part_lse[base + i]);
    for (int d = 1; d < 32; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    if (top == NEG_INF) top = 0.f;
    for (int i = tid; i < count; i += 32) {
      const float w = exp2f(part_lse[base + i] - top);
      weight[i] = w;
      total += w;
    }
    for (int d = 1; d < 32; d <<= 1) total += __shfl_xor_sync(~0u, total, d);
    if (tid == 0) {
      whole = total == 0.f ? 1.f : total;
      if (first_column == 0) lse_out[to] = total == 0.f ? NEG_INF : (top + log2f(total)) * 0.6931471805599453f;
    }
  }
  __syncthreads();
  float4 sum[2] = {};
  auto add = [&](int i, int half, float4 o) {
    const float w = weight[i];
    float4& x = sum[half];
    x.x = fmaf(w, o.x, x.x); x.y = fmaf(w, o.y, x.y); x.z = fmaf(w, o.z, x.z); x.w = fmaf(w, o.w, x.w);
  };
#pragma unroll
  for (int k = 0; k < MERGE_EARLY; ++k)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (group + k * MERGE_GROUPS < count) add(group + k * MERGE_GROUPS, half, early[k][half]);
#pragma unroll 4
  for (int i = group + MERGE_EARLY * MERGE_GROUPS; i < count; i += MERGE_GROUPS)
#pragma unroll
    for (int half = 0; half < 2; ++half) add(i, half, fetch(i, half));
#pragma unroll
  for (int half = 0; half < 2; ++half) *reinterpret_cast<float4*>(&sums[group][column + half * (MERGE_COLUMNS / 2)]) = sum[half];
  __syncthreads();
  if (tid >= MERGE_COLUMNS) return;
  float all = 0.f;
#pragma unroll
  for (int g = 0; g < MERGE_GROUPS; ++g) all += sums[g][tid];
  narrow(out[to * LATENT + first_column + tid], all / whole * kv_scale);
}
