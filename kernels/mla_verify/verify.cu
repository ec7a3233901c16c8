// MLA verify attention over a split prefix, for every card from sm_80 to sm_121: mma.sync, ldmatrix, cp.async.
//
// partial: one block takes 32 query rows (a row is node * heads + head) of one request against one piece of its prefix,
//   or, as piece 0, against the nodes of its draft tree. 8 warps, 98,048 B of shared memory, so that one source fits the
//   101,376 B that sm_120 gives a block.
//     S = Q K^T   Q lives in registers: warp (g, h) holds 32 rows x the g-th 144 of the 576 columns, as MMA fragments,
//                 and takes 16 of a tile's 32 tokens. The four column groups' sums meet in shared memory, in order.
//     softmax     8 threads a row, online.
//     O += P V    warp w owns columns 64 w of the 512. V is the K tile itself, read through ldmatrix.trans.
//   K rows are 1,152 B apart from any slot, by 16 B cp.async from all warps, two tiles of 32 tokens deep; a row's stride in
//   shared memory is 1,168 B, which keeps ldmatrix free of bank conflicts.
// merge: joins a row's partial results in the order of their index.
//
// Bits: tile shapes never depend on the batch or on the tree's size, a piece on nothing but the request's own prefix.
// Tree nodes are summed one by one in float32: a hidden node adds nothing, so siblings cannot move a bit.

#if USE_BF16
#include <cuda_bf16.h>
typedef __nv_bfloat16 T;
#define MMA_TYPE "bf16"
__device__ __forceinline__ float widen(T x) { return __bfloat162float(x); }
__device__ __forceinline__ T narrow(float x) { return __float2bfloat16(x); }
#else
#include <cuda_fp16.h>
typedef __half T;
#define MMA_TYPE "f16"
__device__ __forceinline__ float widen(T x) { return __half2float(x); }
__device__ __forceinline__ T narrow(float x) { return __float2half(x); }
#endif

typedef INDEX_TYPE Index;
typedef unsigned int u32;
typedef long long i64;

constexpr int ROWS = 32, KEYS = 32, DIM = 576, LATENT = 512, THREADS = 256;
constexpr int K_STRIDE = DIM + 8;  // elements
constexpr int S_STRIDE = 40, P_STRIDE = 40;
constexpr int TREE_STRIDE = 132;  // scores of a tree, in the second K tile's place
constexpr int GROUPS = 4, GROUP_STEPS = DIM / GROUPS / 16;
#define NEG_INF __int_as_float(0xff800000)

struct Shared {
  T k[2][KEYS][K_STRIDE];
  float s[GROUPS][ROWS][S_STRIDE];
  T p[ROWS][P_STRIDE];
  float row[2][ROWS];
};
static_assert(sizeof(Shared) <= 101376, "sm_120 gives a block 101,376 B");
static_assert(sizeof(float) * ROWS * TREE_STRIDE <= sizeof(T) * KEYS * K_STRIDE, "a tree's scores fit one K tile");

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], const T* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)));
}
__device__ __forceinline__ void ldmatrix_trans(u32 (&r)[4], const T* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)));
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// 16 bytes, or zeros where the token does not exist.
__device__ __forceinline__ void copy16(void* to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ int piece_tokens(int prefix, int max_splits, int min_split) {
  int each = (prefix + max_splits - 1) / max_splits;
  each = (each + KEYS - 1) / KEYS * KEYS;
  return each > min_split ? each : min_split;
}

// Warp w brings rows 4 w .. 4 w + 3 of the tile; `slot` of lanes 0 to 3 are theirs, -1 where the token does not exist.
__device__ __forceinline__ void load_tile(T (*tile)[K_STRIDE], const T* kv, i64 slot, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < 9; ++i) {
    int chunk = i * 32 + lane, row = chunk / 72, column = (chunk - row * 72) * 8;
    i64 from = __shfl_sync(~0u, slot, row);
    copy16(&tile[warp * 4 + row][column], kv + (from < 0 ? 0 : from) * DIM + column, from >= 0);
  }
  commit();
}

__device__ __forceinline__ i64 slot_of(const Index* own, int at, int end, int warp, int lane) {
  int token = at + warp * 4 + lane;
  return lane < 4 && token < end ? (i64)own[token] : -1;
}

// This warp's part of S for the tile: 32 rows x its 16 tokens, summed over its 144 columns.
__device__ __forceinline__ void scores(Shared& sh, const T (*tile)[K_STRIDE], const u32 (&q)[2][GROUP_STEPS][4], int warp, int lane) {
  const int g = warp >> 1, h = warp & 1;
  float s[2][2][4] = {};
  const T* from = &tile[h * 16 + (lane >> 4) * 8 + (lane & 7)][g * 144 + ((lane >> 3) & 1) * 8];
#pragma unroll
  for (int step = 0; step < GROUP_STEPS; ++step) {
    u32 b[4];
    ldmatrix(b, from + step * 16);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      mma(s[m][0], q[m][step], b[0], b[1]);
      mma(s[m][1], q[m][step], b[2], b[3]);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float* to = &sh.s[g][m * 16 + (lane >> 2)][h * 16 + n * 8 + (lane & 3) * 2];
      *reinterpret_cast<float2*>(to) = make_float2(s[m][n][0], s[m][n][1]);
      *reinterpret_cast<float2*>(to + 8 * S_STRIDE) = make_float2(s[m][n][2], s[m][n][3]);
    }
}

__device__ __forceinline__ float4 whole_scores(const Shared& sh, int row, int sub, float scale) {
  float4 x = *reinterpret_cast<const float4*>(&sh.s[0][row][sub * 4]);
#pragma unroll
  for (int g = 1; g < GROUPS; ++g) {
    float4 y = *reinterpret_cast<const float4*>(&sh.s[g][row][sub * 4]);
    x.x += y.x; x.y += y.y; x.z += y.z; x.w += y.w;
  }
  x.x *= scale; x.y *= scale; x.z *= scale; x.w *= scale;
  return x;
}

// grid (row blocks, 1 + splits, requests). part_out [requests, max_rows, splits + 1, 512] takes normalised float32,
// part_lse [requests, max_rows, splits + 1] its log2-sum-exp2; index 0 is the tree.
extern "C" __global__ void __launch_bounds__(THREADS, 1) partial(
    const T* __restrict__ q, const T* __restrict__ kv, const Index* __restrict__ indices, const i64* __restrict__ starts,
    const int* __restrict__ lens, const u32* __restrict__ words, const int* __restrict__ node_starts,
    float* __restrict__ part_out, float* __restrict__ part_lse, float score_scale, int first_request, int first_block,
    int heads, int max_rows, int splits, int width, int max_splits, int min_split) {
  extern __shared__ __align__(128) unsigned char raw[];
  Shared& sh = *reinterpret_cast<Shared*>(raw);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int request = first_request + blockIdx.z, piece = blockIdx.y;
  const int first_node = node_starts[request], nodes = node_starts[request + 1] - first_node;
  const int prefix = lens[request] - nodes;
  const int first_row = (first_block + blockIdx.x) * ROWS, rows = nodes * heads - first_row;
  if (rows <= 0 || prefix < 0) return;
  int begin = 0, end = prefix;
  if (piece > 0) {
    const int each = piece_tokens(prefix, max_splits, min_split);
    if ((i64)(piece - 1) * each >= prefix) return;
    begin = (piece - 1) * each;
    end = min(begin + each, prefix);
  } else {
    begin = prefix;
    end = prefix + nodes;
  }
  const Index* own = indices + starts[request];
  i64 slot = slot_of(own, begin, end, warp, lane);
  load_tile(sh.k[0], kv, slot, warp, lane);
  slot = slot_of(own, begin + KEYS, end, warp, lane);

  u32 qf[2][GROUP_STEPS][4];
  const T* q_rows = q + ((i64)first_node * heads + first_row) * DIM;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = m * 16 + half * 8 + (lane >> 2);
      const T* from = q_rows + (i64)r * DIM + (warp >> 1) * 144 + (lane & 3) * 2;
#pragma unroll
      for (int step = 0; step < GROUP_STEPS; ++step) {
        qf[m][step][half] = r < rows ? *reinterpret_cast<const u32*>(from + step * 16) : 0u;
        qf[m][step][half + 2] = r < rows ? *reinterpret_cast<const u32*>(from + step * 16 + 8) : 0u;
      }
    }

  float* out = part_out + (((i64)blockIdx.z * max_rows + blockIdx.x * ROWS) * (splits + 1) + piece) * LATENT;
  float* lse = part_lse + ((i64)blockIdx.z * max_rows + blockIdx.x * ROWS) * (splits + 1) + piece;
  const i64 row_step = (i64)(splits + 1) * LATENT;
  const int my_row = tid >> 3, sub = tid & 7;

  if (piece == 0) {
    float* tree = reinterpret_cast<float*>(&sh.k[1][0][0]);
    const int node = (first_row + my_row) / heads;
    float top = NEG_INF;
    for (int at = 0; at < nodes; at += 32) {
      wait_all();
      __syncthreads();
      scores(sh, sh.k[0], qf, warp, lane);
      __syncthreads();
      if (at + 32 < nodes) {
        load_tile(sh.k[0], kv, slot, warp, lane);
        slot = slot_of(own, begin + at + 64, end, warp, lane);
      }
      float4 x = whole_scores(sh, my_row, sub, score_scale);
      const u32 word = my_row < rows ? words[(i64)(first_node + node) * width + (at >> 5)] >> (sub * 4) : 0u;
      const int left = nodes - at - sub * 4;
      x.x = (word & 1u) && left > 0 ? x.x : NEG_INF;
      x.y = (word & 2u) && left > 1 ? x.y : NEG_INF;
      x.z = (word & 4u) && left > 2 ? x.z : NEG_INF;
      x.w = (word & 8u) && left > 3 ? x.w : NEG_INF;
      *reinterpret_cast<float4*>(&tree[my_row * TREE_STRIDE + at + sub * 4]) = x;
      top = fmaxf(fmaxf(top, fmaxf(x.x, x.y)), fmaxf(x.z, x.w));
    }
#pragma unroll
    for (int d = 1; d < 8; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float base = top == NEG_INF ? 0.f : top;
    __syncwarp();
    for (int at = sub * 4; at < (nodes + 31) / 32 * 32; at += 32)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* x = &tree[my_row * TREE_STRIDE + at + i];
        *x = exp2f(*x - base);
      }
    __syncwarp();
    if (sub == 0) {
      float total = 0.f;
      for (int j = 0; j < nodes; ++j) total += tree[my_row * TREE_STRIDE + j];
      sh.row[0][my_row] = total == 0.f ? 1.f : total;
      if (my_row < rows) lse[(i64)my_row * (splits + 1)] = total == 0.f ? NEG_INF : top + log2f(total);
    }
    float acc[ROWS][2] = {};
    for (int at = 0; at < nodes; at += 32) {
      __syncthreads();
      if (nodes > 32) {
        load_tile(sh.k[0], kv, slot_of(own, begin + at, end, warp, lane), warp, lane);
        wait_all();
        __syncthreads();
      }
      for (int j = 0; j < min(32, nodes - at); ++j) {
        const float v0 = widen(sh.k[0][j][tid * 2]), v1 = widen(sh.k[0][j][tid * 2 + 1]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const float p = tree[r * TREE_STRIDE + at + j];
          // A hidden node is skipped, not multiplied by 0: its K/V may be anything, NaN too.
          acc[r][0] = p != 0.f ? fmaf(p, v0, acc[r][0]) : acc[r][0];
          acc[r][1] = p != 0.f ? fmaf(p, v1, acc[r][1]) : acc[r][1];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (r < rows) {
        const float total = sh.row[0][r];
        *reinterpret_cast<float2*>(out + r * row_step + tid * 2) = make_float2(acc[r][0] / total, acc[r][1] / total);
      }
    return;
  }

  float acc[2][8][4] = {};
  float top = NEG_INF, total = 0.f;
  int buffer = 0;
  for (int at = begin; at < end; at += KEYS, buffer ^= 1) {
    const T (*tile)[K_STRIDE] = sh.k[buffer];
    wait_all();
    __syncthreads();  // this tile is here, and nobody reads the other one any more
    if (at + KEYS < end) {
      load_tile(sh.k[buffer ^ 1], kv, slot, warp, lane);
      slot = slot_of(own, at + 2 * KEYS, end, warp, lane);
    }
    scores(sh, tile, qf, warp, lane);
    __syncthreads();
    float4 x = whole_scores(sh, my_row, sub, score_scale);
    const int left = end - at - sub * 4;
    x.x = left > 0 ? x.x : NEG_INF;
    x.y = left > 1 ? x.y : NEG_INF;
    x.z = left > 2 ? x.z : NEG_INF;
    x.w = left > 3 ? x.w : NEG_INF;
    float higher = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
#pragma unroll
    for (int d = 1; d < 8; d <<= 1) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, d));
    higher = fmaxf(higher, top);
    const float shrink = exp2f(top - higher);
    top = higher;
    x.x = exp2f(x.x - top); x.y = exp2f(x.y - top); x.z = exp2f(x.z - top); x.w = exp2f(x.w - top);
    total = total * shrink + ((x.x + x.y) + (x.z + x.w));
    T packed[4] = {narrow(x.x), narrow(x.y), narrow(x.z), narrow(x.w)};
    *reinterpret_cast<uint2*>(&sh.p[my_row][sub * 4]) = *reinterpret_cast<uint2*>(packed);
    if (sub == 0) sh.row[0][my_row] = shrink;
    if (__syncthreads_or(shrink != 1.f)) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float a = sh.row[0][m * 16 + (lane >> 2)], b = sh.row[0][m * 16 + 8 + (lane >> 2)];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          acc[m][n][0] *= a; acc[m][n][1] *= a; acc[m][n][2] *= b; acc[m][n][3] *= b;
        }
      }
    }
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      u32 p[2][4];
      ldmatrix(p[0], &sh.p[lane & 15][step * 16 + (lane >> 4) * 8]);
      ldmatrix(p[1], &sh.p[16 + (lane & 15)][step * 16 + (lane >> 4) * 8]);
      const T* from = &tile[step * 16 + (lane & 15)][warp * 64 + (lane >> 4) * 8];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        u32 v[4];
        ldmatrix_trans(v, from + n * 16);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma(acc[m][n * 2], p[m], v[0], v[1]);
          mma(acc[m][n * 2 + 1], p[m], v[2], v[3]);
        }
      }
    }
  }
#pragma unroll
  for (int d = 1; d < 8; d <<= 1) total += __shfl_xor_sync(~0u, total, d);
  if (sub == 0) {
    sh.row[1][my_row] = 1.f / total;
    if (my_row < rows) lse[(i64)my_row * (splits + 1)] = top + log2f(total);
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = m * 16 + half * 8 + (lane >> 2);
      if (r < rows) {
        const float norm = sh.row[1][r];
#pragma unroll
        for (int n = 0; n < 8; ++n)
          *reinterpret_cast<float2*>(out + r * row_step + warp * 64 + n * 8 + (lane & 3) * 2) =
              make_float2(acc[m][n][half * 2] * norm, acc[m][n][half * 2 + 1] * norm);
      }
    }
}

// grid (rows, requests), 512 threads: four groups take every fourth partial result, 128 threads x 4 columns each.
constexpr int MERGE_GROUPS = 4, MOST_PIECES = 512;
extern "C" __global__ void __launch_bounds__(512) merge(
    const float* __restrict__ part_out, const float* __restrict__ part_lse, const int* __restrict__ lens,
    const int* __restrict__ node_starts, T* __restrict__ out, float* __restrict__ lse_out, float kv_scale,
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
    out[to * LATENT + tid] = narrow(0.f);
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
  out[to * LATENT + tid] = narrow(all / whole[0] * kv_scale);
}
