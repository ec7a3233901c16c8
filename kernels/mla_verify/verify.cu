// MLA verify attention over a split prefix, for every card from sm_80 to sm_121: mma.sync, ldmatrix, bulk copies with
// mbarriers (cp.async before sm_90).
//
// partial_R (R = 16, 32, 64): one block takes R query rows (a row is node * heads + head) of one request against one
//   piece of its prefix, or, as piece 0, against the nodes of its draft tree. 8 warps and at most 99,904 B of shared
//   memory: one source fits the 101,376 B that sm_120 gives a block. Tiles of 16 tokens pass through a ring of four (of
//   eight, for e4m3): one gives V to the products of the tile before, one is worked on, the others are on their way.
//     S = Q K^T   Q lives in registers as MMA fragments. Four groups of warps own 144 of the 576 columns each; the two
//                 warps of a group share out the rows (R = 64) or the tokens. The groups' sums meet in shared memory.
//     softmax     online; runs beside the P V of the tile before and the Q K^T of the tile after.
//     O += P V    warp w owns columns 64 w of the 512. V is the K tile itself, read through ldmatrix.trans.
//   Between two tiles all warps meet twice, back to back: scores are there, scores are read. Everything else is free.
//   K rows are 1,152 B (576 B of e4m3) from any slot, a bulk copy each; a row's stride in shared memory is 16 B more, which
//   keeps ldmatrix free of bank conflicts.
// e4m3 K/V become fp16 in registers, exactly, and so does P; Q becomes fp16 times a power of two of its row and column
//   group, which is exact but for what is 2^37 times smaller than the largest.
// merge: joins a row's partial results in the order of their index.
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
#if BULK
__device__ __forceinline__ void barrier_init(u64* b) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* b, u32 phase) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
               ::"r"(shared_address(b)), "r"(phase) : "memory");
}
__device__ __forceinline__ void copy_bulk(void* to, const void* from, u32 bytes, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
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

constexpr int KEYS = 16, STAGES = 8 / sizeof(KV), DIM = 576, LATENT = 512, THREADS = 256;
constexpr int AHEAD = STAGES - 2;  // tiles on their way while one is worked on and one is V
constexpr int CHUNK = 16 / sizeof(KV), ROW_CHUNKS = DIM / CHUNK;  // 16 B: elements of one, and how many a row has
constexpr int K_STRIDE = DIM + CHUNK;  // elements
constexpr int P_STRIDE = KEYS + 8;
constexpr int TREE_STRIDE = 132;  // scores of a tree, where the second K tile and those behind it would lie
constexpr int GROUPS = 4, GROUP_COLUMNS = DIM / GROUPS, GROUP_STEPS = GROUP_COLUMNS / 16;
#define NEG_INF __int_as_float(0xff800000)

template <int ROWS>
struct Shared {
  KV k[STAGES][KEYS][K_STRIDE];
  float s[GROUPS][ROWS][KEYS];  // chunks of 4 tokens, swizzled: see chunk()
  T p[2][ROWS][P_STRIDE];
  float row[2][ROWS];
  float q_scale[GROUPS][ROWS];  // e4m3 only: what Q was divided by
  u64 full[STAGES];
};
static_assert(sizeof(Shared<64>) <= 101376, "sm_120 gives a block 101,376 B");
static_assert(sizeof(Shared<64>) == SHARED_BYTES_64, "Variant.shared_bytes in cuda_kernels.py differs");
static_assert(sizeof(float) * 64 * TREE_STRIDE <= sizeof(KV) * (STAGES - 1) * KEYS * K_STRIDE, "a tree's scores fit the ring");

// Which warp does what in S = Q K^T: 32 rows (16 where there are no more) x 16 tokens at R = 64, x 8 tokens below.
template <int ROWS>
struct Part {
  static constexpr int MS = ROWS == 16 ? 1 : 2;   // 16-row steps of a warp
  static constexpr int NS = ROWS == 64 ? 2 : 1;   // 8-token steps of a warp
};

// Where the 4 tokens of chunk c of a row lie: stores of 8 rows x 2 tokens a thread then hit every bank once.
__device__ __forceinline__ int chunk(int row, int c) { return (c ^ (row & 2)) * 4; }

__device__ __forceinline__ int piece_tokens(int prefix, int max_splits, int min_split) {
  int each = (prefix + max_splits - 1) / max_splits;
  each = (each + KEYS - 1) / KEYS * KEYS;
  return each > min_split ? each : min_split;
}

// Warp w brings rows 2 w and 2 w + 1 of a tile. Their slots, in lanes 0 and 1: of a token past the end, the last one's
// again. Its score is masked, and 0 times what a real row holds is 0; what else lay there might be NaN.
__device__ __forceinline__ Index slot_of(const Index* own, int tile, int tokens, int warp, int lane) {
  return own[min(tile * KEYS + warp * 2 + (lane & 1), tokens - 1)];
}
// By cp.async.
__device__ __forceinline__ void load_tile(KV (*tile)[K_STRIDE], const KV* kv, Index slot, int warp, int lane) {
  const KV* a = kv + (i64)__shfl_sync(~0u, slot, 0) * DIM;
  const KV* b = kv + (i64)__shfl_sync(~0u, slot, 1) * DIM - DIM;
#pragma unroll
  for (int c = lane; c < 2 * ROW_CHUNKS; c += 32)
    copy16(tile[warp * 2] + c * CHUNK + (c < ROW_CHUNKS ? 0 : K_STRIDE - DIM), (c < ROW_CHUNKS ? a : b) + c * CHUNK);
}
#if BULK
// By one bulk copy a row.
__device__ __forceinline__ void load_tile_bulk(KV (*tile)[K_STRIDE], u64* full, const KV* kv, Index slot, int warp, int lane) {
  if (warp == 0 && lane == 0) barrier_expect(full, KEYS * DIM * (u32)sizeof(KV));
  if (lane < 2) copy_bulk(tile[warp * 2 + lane], kv + (i64)slot * DIM, DIM * sizeof(KV), full);
}
#endif

// This warp's part of S for the tile, summed over its 144 columns, to shared memory.
template <int ROWS>
__device__ __forceinline__ void scores(Shared<ROWS>& sh, const KV (*tile)[K_STRIDE], const u32 (&q)[Part<ROWS>::MS][GROUP_STEPS][4], int warp, int lane) {
  constexpr int MS = Part<ROWS>::MS, NS = Part<ROWS>::NS;
  const int g = warp >> 1, half = warp & 1;
  const int first_row = ROWS == 64 ? half * 32 : 0, first_token = ROWS == 64 ? 0 : half * 8;
  float s[MS][NS][4] = {};
  // An ldmatrix brings four 8 x 16 B blocks: 8 tokens x a k-step of e4m3, or x half a k-step of the wider types.
  constexpr int PARTS = sizeof(KV) == 1 ? 1 : 2, STEPS = 4 / PARTS / NS;
  const int block = lane >> 3, part = block % PARTS, n_of = block / PARTS % NS, step_of = block / PARTS / NS;
  const KV* from = &tile[first_token + n_of * 8 + (lane & 7)][g * GROUP_COLUMNS + step_of * 16 + part * 8];
#pragma unroll
  for (int step = 0; step < GROUP_STEPS; step += STEPS) {
    u32 b[4];
    ldmatrix(b, from + step * 16);  // the last may reach past the group's columns, even past the row: nothing takes that
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
        for (int m = 0; m < MS; ++m) mma(s[m][n], q[m][step + ahead], b0, b1);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < MS; ++m)
#pragma unroll
    for (int n = 0; n < NS; ++n) {
      const int row = first_row + m * 16 + (lane >> 2), token = first_token + n * 8 + (lane & 3) * 2;
      float* to = &sh.s[g][row][chunk(row, token >> 2) + (token & 2)];
      *reinterpret_cast<float2*>(to) = make_float2(s[m][n][0], s[m][n][1]);
      *reinterpret_cast<float2*>(to + 8 * KEYS) = make_float2(s[m][n][2], s[m][n][3]);
    }
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

template <int ROWS>
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int d = 1; d < Lane<ROWS>::EACH; d <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

// The pairs' sums in one fixed order: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
template <int ROWS>
__device__ __forceinline__ float row_sum(const float (&pair)[Lane<ROWS>::PAIRS]) {
  float x = pair[0];
  if (Lane<ROWS>::PAIRS == 2) x += pair[Lane<ROWS>::PAIRS - 1];
#pragma unroll
  for (int d = 1; d < Lane<ROWS>::EACH; d <<= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// acc (all rows x this warp's 64 columns) = acc * shrink + P V for one tile.
template <int ROWS>
__device__ __forceinline__ void accumulate(const Shared<ROWS>& sh, float (&acc)[ROWS / 16][8][4], const KV (*tile)[K_STRIDE], int parity, bool shrink, int warp, int lane) {
  if (shrink) {
#pragma unroll
    for (int m = 0; m < ROWS / 16; ++m) {
      const float a = sh.row[parity][m * 16 + (lane >> 2)], b = sh.row[parity][m * 16 + 8 + (lane >> 2)];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        acc[m][n][0] *= a; acc[m][n][1] *= a; acc[m][n][2] *= b; acc[m][n][3] *= b;
      }
    }
  }
  u32 p[ROWS / 16][4];
#pragma unroll
  for (int m = 0; m < ROWS / 16; ++m) ldmatrix(p[m], &sh.p[parity][m * 16 + (lane & 15)][(lane >> 4) * 8]);
  // A block of V is 8 tokens x 16 B; of e4m3 that is twice as many columns, the even ones in one product, the odd in another.
  const KV* from = &tile[lane & 15][warp * 64 + (lane >> 4) * CHUNK];
#pragma unroll
  for (int n = 0; n < 8; n += sizeof(KV) == 1 ? 4 : 2) {
    u32 v[4];
    ldmatrix_trans(v, from + n * 8);
#if KV_E4M3
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const u32 first = __byte_perm(v[c * 2], 0, 0x3120), second = __byte_perm(v[c * 2 + 1], 0, 0x3120);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const u32 b0 = widen_e4m3(first, odd), b1 = widen_e4m3(second, odd);
#pragma unroll
        for (int m = 0; m < ROWS / 16; ++m) mma(acc[m][n + c * 2 + odd], p[m], b0, b1);
      }
    }
#else
#pragma unroll
    for (int m = 0; m < ROWS / 16; ++m) {
      mma(acc[m][n], p[m], v[0], v[1]);
      mma(acc[m][n + 1], p[m], v[2], v[3]);
    }
#endif
  }
}

// This warp's rows and columns of Q as MMA fragments. e4m3 K comes with four neighbouring columns in a register, so there
// the columns of a k-step are dealt out to the threads in that order.
template <int ROWS>
__device__ __forceinline__ void load_q(Shared<ROWS>& sh, u32 (&f)[Part<ROWS>::MS][GROUP_STEPS][4], const Q* q, int rows, int warp, int lane) {
  constexpr bool NARROW = sizeof(KV) == 1;
#pragma unroll
  for (int m = 0; m < Part<ROWS>::MS; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = (ROWS == 64 ? (warp & 1) * 32 : 0) + m * 16 + half * 8 + (lane >> 2);
      const Q* from = q + (i64)r * DIM + (warp >> 1) * GROUP_COLUMNS + (lane & 3) * (NARROW ? 4 : 2);
#pragma unroll
      for (int step = 0; step < GROUP_STEPS; ++step) {
        f[m][step][half] = r < rows ? *reinterpret_cast<const u32*>(from + step * 16) : 0u;
        f[m][step][half + 2] = r < rows ? *reinterpret_cast<const u32*>(from + step * 16 + (NARROW ? 2 : 8)) : 0u;
      }
#if KV_E4M3
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < GROUP_STEPS * 2; ++i) {
        const float2 x = pair(f[m][i / 2][half + i % 2 * 2]);
        most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      // The largest comes to lie in [2^13, 2^14): no sum of two overflows, and nothing that matters falls off below.
      const int power = min(max((__float_as_int(most) >> 23) - 13, 1), 240);
      const float times = __int_as_float((254 - power) << 23);
#pragma unroll
      for (int i = 0; i < GROUP_STEPS * 2; ++i) {
        u32& y = f[m][i / 2][half + i % 2 * 2];
        const float2 x = pair(y);
        T both[2];
        narrow(both[0], x.x * times);
        narrow(both[1], x.y * times);
        y = *reinterpret_cast<u32*>(both);
      }
      if ((lane & 3) == 0 && (ROWS == 64 || (warp & 1) == 0)) sh.q_scale[warp >> 1][r] = __int_as_float(power << 23);
#endif
    }
}

// Where a block's first row lies among the partial results.
template <int ROWS>
__device__ __forceinline__ i64 part_index(int max_rows, int splits) {
  return ((i64)blockIdx.z * max_rows + blockIdx.x * ROWS) * (splits + 1) + blockIdx.y;
}

// The draft tree: piece 0. Scores of all nodes first, then a sum over each row's own ancestors, in their order.
template <int ROWS>
__device__ __forceinline__ void tree_piece(
    Shared<ROWS>& sh, const u32 (&q)[Part<ROWS>::MS][GROUP_STEPS][4], const KV* kv, const Index* own, const u32* words,
    int width, int nodes, int first_row, int rows, int heads, float score_scale, float* part_out, float* part_lse,
    int max_rows, int splits, int tid) {
  constexpr int N = Lane<ROWS>::PAIRS * 2;
  const int warp = tid >> 5, lane = tid & 31;
  const int my_row = tid / Lane<ROWS>::EACH, sub = tid % Lane<ROWS>::EACH;
  const bool has_row = ROWS > 16 || my_row < ROWS;
  const i64 part = part_index<ROWS>(max_rows, splits), step = splits + 1;
  float* tree = reinterpret_cast<float*>(&sh.k[1][0][0]);
  const u32* mine = words + (i64)(has_row && my_row < rows ? (first_row + my_row) / heads : 0) * width;
  float top = NEG_INF;
  load_tile(sh.k[0], kv, slot_of(own, 0, nodes, warp, lane), warp, lane);
  commit();
  for (int at = 0; at < nodes; at += KEYS) {
    wait_all_but<0>();
    __syncthreads();
    scores<ROWS>(sh, sh.k[0], q, warp, lane);
    __syncthreads();
    if (at + KEYS < nodes) load_tile(sh.k[0], kv, slot_of(own, at / KEYS + 1, nodes, warp, lane), warp, lane);
    commit();
    if (has_row) {
      float x[N];
      whole_scores<ROWS>(x, sh, my_row, sub, score_scale);
      const u32 word = my_row < rows ? mine[at >> 5] >> (at & 31) : 0u;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int token = sub * N + j;
        x[j] = (word >> token) & 1u && at + token < nodes ? x[j] : NEG_INF;
        tree[my_row * TREE_STRIDE + at + token] = x[j];
        top = fmaxf(top, x[j]);
      }
    }
  }
  top = row_max<ROWS>(top);
  const float base = top == NEG_INF ? 0.f : top;
  __syncwarp();
  if (has_row) {
    for (int at = sub; at < nodes; at += Lane<ROWS>::EACH) {
      float* x = &tree[my_row * TREE_STRIDE + at];
      *x = exp2_fast(*x - base);
    }
  }
  __syncwarp();
  if (has_row && sub == 0) {
    float total = 0.f;
    for (int j = 0; j < nodes; ++j) total += tree[my_row * TREE_STRIDE + j];
    sh.row[0][my_row] = total == 0.f ? 0.f : 1.f / total;
    if (my_row < rows) part_lse[part + my_row * step] = total == 0.f ? NEG_INF : top + log2f(total);
  }
  float acc[ROWS][2] = {};
  for (int at = 0; at < nodes; at += KEYS) {
    __syncthreads();
    if (nodes > KEYS) {
      load_tile(sh.k[0], kv, slot_of(own, at / KEYS, nodes, warp, lane), warp, lane);
      commit();
      wait_all_but<0>();
      __syncthreads();
    }
    int node = first_row / heads, head = first_row % heads;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      // All threads take the same way here. A hidden node is left out, not multiplied by 0: its K/V may be anything.
      u32 visible = r < rows ? (words[(i64)node * width + (at >> 5)] >> (at & 31)) & 0xffffu : 0u;
      if (at + KEYS > nodes) visible &= (1u << (nodes - at)) - 1;
      while (visible) {
        const int j = __ffs(visible) - 1;
        visible &= visible - 1;
        const float p = tree[r * TREE_STRIDE + at + j];
        acc[r][0] = fmaf(p, value(sh.k[0][j][tid * 2]), acc[r][0]);
        acc[r][1] = fmaf(p, value(sh.k[0][j][tid * 2 + 1]), acc[r][1]);
      }
      if (++head == heads) head = 0, ++node;
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    if (r < rows) {
      const float norm = sh.row[0][r];
      *reinterpret_cast<float2*>(part_out + (part + r * step) * LATENT + tid * 2) = make_float2(acc[r][0] * norm, acc[r][1] * norm);
    }
}

template <int ROWS>
__device__ __forceinline__ void partial(
    unsigned char* raw, const Q* q, const KV* kv, const Index* indices, const i64* starts, const int* lens,
    const u32* words, const int* node_starts, float* part_out, float* part_lse, float score_scale, int first_request,
    int first_block, int heads, int max_rows, int splits, int width, int max_splits, int min_split) {
  constexpr int MS = Part<ROWS>::MS, M = ROWS / 16, N = Lane<ROWS>::PAIRS * 2;
  Shared<ROWS>& sh = *reinterpret_cast<Shared<ROWS>*>(raw);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int request = first_request + blockIdx.z, piece = blockIdx.y;
  const int first_node = node_starts[request], nodes = node_starts[request + 1] - first_node;
  const int prefix = lens[request] - nodes;
  const int first_row = (first_block + blockIdx.x) * ROWS, rows = nodes * heads - first_row;
  if (rows <= 0 || prefix < 0) return;
  int begin = prefix, tokens = nodes;
  if (piece > 0) {
    const int each = piece_tokens(prefix, max_splits, min_split);
    if ((i64)(piece - 1) * each >= prefix) return;
    begin = (piece - 1) * each;
    tokens = min(each, prefix - begin);
  }
  const Index* own = indices + starts[request] + begin;
  const int tiles = (tokens + KEYS - 1) / KEYS;
  Index slot;
  auto load = [&](int i, Index slot) {
#if BULK
    if (i * KEYS < tokens) load_tile_bulk(sh.k[i % STAGES], &sh.full[i % STAGES], kv, slot, warp, lane);
#else
    if (i * KEYS < tokens) load_tile(sh.k[i % STAGES], kv, slot, warp, lane);
    commit();
#endif
  };
  if (piece > 0) {
#if BULK
    if (tid < STAGES) barrier_init(&sh.full[tid]);
    barrier_init_done();
    __syncthreads();
#endif
    for (int i = 0; i < AHEAD; ++i) load(i, slot_of(own, i, tokens, warp, lane));
    slot = slot_of(own, AHEAD, tokens, warp, lane);
  }

  u32 qf[MS][GROUP_STEPS][4];
  load_q<ROWS>(sh, qf, q + ((i64)first_node * heads + first_row) * DIM, rows, warp, lane);
  if (piece == 0) {
    tree_piece<ROWS>(sh, qf, kv, own, words + (i64)first_node * width, width, nodes, first_row, rows, heads,
                     score_scale, part_out, part_lse, max_rows, splits, tid);
    return;
  }

  const int my_row = tid / Lane<ROWS>::EACH, sub = tid % Lane<ROWS>::EACH;
  const bool has_row = ROWS > 16 || warp < 4;  // 8 threads a row: at 16 rows half of the warps have none
  // From here `own` is this lane's: the token of slot_of, tile by tile.
  const int last = tokens - 1 - warp * 2 - (lane & 1);
  own += warp * 2 + (lane & 1);
  float acc[M][8][4] = {};
  float top = NEG_INF, total[N / 2] = {};
  bool shrunk = false;
  // Tile 0 has none before it: its turn multiplies its own V by zeros.
  for (int c = tid; c < ROWS * P_STRIDE / 2; c += THREADS) reinterpret_cast<u32*>(&sh.p[1][0][0])[c] = 0u;
#if BULK
  barrier_wait(&sh.full[0], 0);
#else
  wait_all_but<AHEAD - 1>();
#endif
  __syncthreads();
  scores<ROWS>(sh, sh.k[0], qf, warp, lane);
  // In this order, and with no count of tiles kept, e4m3 fits 255 registers too, on sm_90 to sm_121.
  for (int i = 0; i * KEYS < tokens; ++i) {
#if !BULK
    wait_all_but<AHEAD - 2>();  // tile i + 1
#endif
    // Here: S of tile i, P of tile i - 1. Nobody reads tile i - 2 any more.
    const bool rescale = __syncthreads_or(shrunk);
    float x[N];
    if (has_row) whole_scores<ROWS>(x, sh, my_row, sub, score_scale);
    __syncthreads();
    load(i + AHEAD, slot);
    slot = own[min((i + AHEAD + 1) * KEYS, last)];
#if BULK
    if ((i + 1) * KEYS < tokens) barrier_wait(&sh.full[(i + 1) % STAGES], ((i + 1) / STAGES) & 1);
#endif
    if (has_row) {
      const int left = tokens - i * KEYS - sub * N;
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] = left > j ? x[j] : NEG_INF;
      float higher = fmaxf(x[0], x[1]);
      if (N == 4) higher = fmaxf(higher, fmaxf(x[N - 2], x[N - 1]));
      higher = row_max<ROWS>(higher);
      // A row moves its base only when a score passes it by 2^8: P stays well within its dtype, and most tiles rescale
      // nothing. The decision is the row's own, so its neighbours cannot move its bits.
      const float base = higher > top + 8.f ? higher : top;
      const float shrink = exp2_fast(top - base);
      top = base;
      T packed[N];
#pragma unroll
      for (int j = 0; j < N; j += 2) {
        const float a = exp2_fast(x[j] - top), b = exp2_fast(x[j + 1] - top);
        total[j / 2] = total[j / 2] * shrink + (a + b);
        narrow(packed[j], a);
        narrow(packed[j + 1], b);
      }
      T* to = &sh.p[i & 1][my_row][sub * N];
      if (N == 4) *reinterpret_cast<uint2*>(to) = *reinterpret_cast<uint2*>(packed);
      else *reinterpret_cast<u32*>(to) = *reinterpret_cast<u32*>(packed);
      if (sub == 0) sh.row[i & 1][my_row] = shrink;
      shrunk = shrink != 1.f;
    }
    accumulate<ROWS>(sh, acc, sh.k[(i > 0 ? i - 1 : 0) % STAGES], (i - 1) & 1, rescale, warp, lane);
    // After the last tile these are scores of what lies in the ring, which nobody reads.
    scores<ROWS>(sh, sh.k[(i + 1) % STAGES], qf, warp, lane);
  }
  const i64 part = part_index<ROWS>(max_rows, splits), step = splits + 1;
  const bool rescale = __syncthreads_or(shrunk);
  accumulate<ROWS>(sh, acc, sh.k[(tiles - 1) % STAGES], (tiles - 1) & 1, rescale, warp, lane);
  __syncthreads();
  if (has_row) {
    const float all = row_sum<ROWS>(total);
    if (sub == 0) {
      sh.row[1][my_row] = 1.f / all;
      if (my_row < rows) part_lse[part + my_row * step] = top + log2f(all);
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = m * 16 + half * 8 + (lane >> 2);
      if (r < rows) {
        const float norm = sh.row[1][r];
        float* to = part_out + (part + r * step) * LATENT + warp * 64;
        const auto& o = acc[m];
        const int h = half * 2;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
#if KV_E4M3
          const float4 y = make_float4(o[n][h] * norm, o[n + 1][h] * norm, o[n][h + 1] * norm, o[n + 1][h + 1] * norm);
          *reinterpret_cast<float4*>(to + n * 8 + (lane & 3) * 4) = y;
#else
          *reinterpret_cast<float2*>(to + n * 8 + (lane & 3) * 2) = make_float2(o[n][h] * norm, o[n][h + 1] * norm);
          *reinterpret_cast<float2*>(to + n * 8 + 8 + (lane & 3) * 2) = make_float2(o[n + 1][h] * norm, o[n + 1][h + 1] * norm);
#endif
        }
      }
    }
}

// grid (row blocks, 1 + splits, requests). part_out [requests, max_rows, splits + 1, 512] takes normalised float32,
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
// grid (rows, requests), 512 threads: four groups take every fourth partial result, 128 threads x 4 columns each.
constexpr int MERGE_GROUPS = 4, MOST_PIECES = 512;
extern "C" __global__ void __launch_bounds__(512) merge(
    const float* __restrict__ part_out, const float* __restrict__ part_lse, const int* __restrict__ lens,
    const int* __restrict__ node_starts, Q* __restrict__ out, float* __restrict__ lse_out, float kv_scale,
    int first_request, int first_row, int heads, int max_rows, int splits, int max_splits, int min_split) {
  __shared__ float weight[MOST_PIECES];
  __shared__ float sums[MERGE_GROUPS][LATENT];
  __shared__ float whole[2];
  const int tid = threadIdx.x, request = first_request + blockIdx.y, row = first_row + blockIdx.x;
  const int first_node = node_starts[request], nodes = node_starts[request + 1] - first_node;
  const int prefix = lens[request] - nodes;
  if (row >= nodes * heads) return;
  const i64 to = (i64)first_node * heads + row;
  if (prefix < 0) {
    narrow(out[to * LATENT + tid], 0.f);
    if (tid == 0) lse_out[to] = NEG_INF;
    return;
  }
  const int each = piece_tokens(prefix, max_splits, min_split);
  const int count = min((prefix + each - 1) / each, splits) + 1;
  const i64 base = ((i64)blockIdx.y * max_rows + blockIdx.x) * (splits + 1);
  if (tid < 32) {
    float top = NEG_INF, total = 0.f;
    for (int i = tid; i < count; i += 32) {
      top = fmaxf(top, part_lse[base + i]);
    }
    for (int d = 1; d < 32; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    if (top == NEG_INF) top = 0.f;
    for (int i = tid; i < count; i += 32) {
      const float w = exp2f(part_lse[base + i] - top);
      weight[i] = w;
      total += w;
    }
    for (int d = 1; d < 32; d <<= 1) total += __shfl_xor_sync(~0u, total, d);
    if (tid == 0) {
      whole[0] = total == 0.f ? 1.f : total;
      lse_out[to] = total == 0.f ? NEG_INF : (top + log2f(total)) * 0.6931471805599453f;
    }
  }
  __syncthreads();
  const int group = tid >> 7, column = (tid & 127) * 4;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
  for (int i = group; i < count; i += MERGE_GROUPS) {
    const float4 o = *reinterpret_cast<const float4*>(part_out + (base + i) * LATENT + column);
    const float w = weight[i];
    sum.x = fmaf(w, o.x, sum.x); sum.y = fmaf(w, o.y, sum.y); sum.z = fmaf(w, o.z, sum.z); sum.w = fmaf(w, o.w, sum.w);
  }
  *reinterpret_cast<float4*>(&sums[group][column]) = sum;
  __syncthreads();
  float all = 0.f;
#pragma unroll
  for (int g = 0; g < MERGE_GROUPS; ++g) all += sums[g][tid];
  narrow(out[to * LATENT + tid], all / whole[0] * kv_scale);
}
