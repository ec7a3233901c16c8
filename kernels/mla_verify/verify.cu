// MLA verify attention over a split prefix, for every card from sm_80 to sm_121: mma.sync, ldmatrix, cp.async.
//
// partial: one block takes 32 query rows (a row is node * heads + head) of one request against one piece of its prefix,
//   or, as piece 0, against the nodes of its draft tree. 8 warps and 90,368 B of shared memory: one source fits the
//   101,376 B that sm_120 gives a block. Tiles of 16 tokens pass through a ring of four: one holds V of the tile before,
//   one is worked on, two are on their way.
//     S = Q K^T   Q lives in registers as MMA fragments: warp (g, h) holds 32 rows x the g-th 144 of the 576 columns and
//                 takes 8 of the 16 tokens. The four column groups' sums meet in shared memory, added in order.
//     softmax     8 threads a row, online, while the tensor cores do the P V of the tile before.
//     O += P V    warp w owns columns 64 w of the 512. V is the K tile itself, read through ldmatrix.trans.
//   K rows are 1,152 B from any slot, by 16 B cp.async from all warps; a row's stride in shared memory is 1,168 B, which
//   keeps ldmatrix free of bank conflicts.
// merge: joins a row's partial results in the order of their index.
//
// Bits: tile shapes never depend on the batch or on the tree's size, a piece on nothing but the request's own prefix.
// Tree nodes are summed one by one in float32: a hidden node adds nothing, so siblings cannot move a bit.
//
// plans/0002 has what each version changed and measured.

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

constexpr int ROWS = 32, KEYS = 16, STAGES = 4, DIM = 576, LATENT = 512, THREADS = 256;
constexpr int K_STRIDE = DIM + 8;  // elements
constexpr int S_STRIDE = 24, P_STRIDE = 24;
constexpr int TREE_STRIDE = 132;  // scores of a tree, in the second K tile's place
constexpr int GROUPS = 4, GROUP_STEPS = DIM / GROUPS / 16;
#define NEG_INF __int_as_float(0xff800000)

struct Shared {
  T k[STAGES][KEYS][K_STRIDE];
  float s[GROUPS][ROWS][S_STRIDE];
  T p[2][ROWS][P_STRIDE];
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
__device__ __forceinline__ void ldmatrix_half(u32 (&r)[2], const T* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(p)));
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
__device__ __forceinline__ void wait_all_but_newest() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

__device__ __forceinline__ int piece_tokens(int prefix, int max_splits, int min_split) {
  int each = (prefix + max_splits - 1) / max_splits;
  each = (each + KEYS - 1) / KEYS * KEYS;
  return each > min_split ? each : min_split;
}

// Warp w brings rows 2 w and 2 w + 1 of the tile; `slot` of lanes 0 and 1 are theirs, -1 where the token does not exist.
// The two rows are 144 chunks of 16 B; addresses are arranged so that all but the third take an immediate offset.
__device__ __forceinline__ void load_tile(T (*tile)[K_STRIDE], const T* kv, Index slot, int warp, int lane) {
  const Index first = __shfl_sync(~0u, slot, 0), second = __shfl_sync(~0u, slot, 1);
  const T* a = kv + (i64)(first < 0 ? 0 : first) * DIM + lane * 8;
  const T* b = kv + ((i64)(second < 0 ? 0 : second) - 1) * DIM + lane * 8;
  T* to = &tile[warp * 2][lane * 8];
  copy16(to, a, first >= 0);
  copy16(to + 256, a + 256, first >= 0);
  if (lane < 8) copy16(to + 512, a + 512, first >= 0);
  else copy16(to + 512 + 8, b + 512, second >= 0);
  copy16(to + 768 + 8, b + 768, second >= 0);
  if (lane < 16) copy16(to + 1024 + 8, b + 1024, second >= 0);
  commit();
}

// The slot stays as it was read: widening it here would wait for the load.
__device__ __forceinline__ Index slot_of(const Index* own, int at, int end, int warp, int lane) {
  const int token = at + warp * 2 + lane;
  return lane < 2 && token < end ? own[token] : (Index)-1;
}

// This warp's part of S for the tile: 32 rows x its 8 tokens, summed over its 144 columns in two interleaved chains.
__device__ __forceinline__ void scores(Shared& sh, const T (*tile)[K_STRIDE], const u32 (&q)[2][GROUP_STEPS][4], int warp, int lane) {
  const int g = warp >> 1, h = warp & 1;
  float s[2][2][4] = {};
  const T* from = &tile[h * 8 + (lane & 7)][g * 144 + (lane >> 3) * 8];
#pragma unroll
  for (int step = 0; step < GROUP_STEPS - 1; step += 2) {
    u32 b[4];
    ldmatrix(b, from + step * 16);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      mma(s[m][0], q[m][step], b[0], b[1]);
      mma(s[m][1], q[m][step + 1], b[2], b[3]);
    }
  }
  u32 b[2];
  ldmatrix_half(b, &tile[h * 8 + (lane & 7)][g * 144 + (GROUP_STEPS - 1) * 16 + ((lane >> 3) & 1) * 8]);
#pragma unroll
  for (int m = 0; m < 2; ++m) mma(s[m][0], q[m][GROUP_STEPS - 1], b[0], b[1]);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float* to = &sh.s[g][m * 16 + (lane >> 2)][h * 8 + (lane & 3) * 2];
    *reinterpret_cast<float2*>(to) = make_float2(s[m][0][0] + s[m][1][0], s[m][0][1] + s[m][1][1]);
    *reinterpret_cast<float2*>(to + 8 * S_STRIDE) = make_float2(s[m][0][2] + s[m][1][2], s[m][0][3] + s[m][1][3]);
  }
}

__device__ __forceinline__ float2 whole_scores(const Shared& sh, int row, int sub, float scale) {
  float2 x = *reinterpret_cast<const float2*>(&sh.s[0][row][sub * 2]);
#pragma unroll
  for (int g = 1; g < GROUPS; ++g) {
    const float2 y = *reinterpret_cast<const float2*>(&sh.s[g][row][sub * 2]);
    x.x += y.x;
    x.y += y.y;
  }
  return make_float2(x.x * scale, x.y * scale);
}

// acc (32 rows x this warp's 64 columns) = acc * shrink + P V for one tile.
__device__ __forceinline__ void accumulate(const Shared& sh, float (&acc)[2][8][4], const T (*tile)[K_STRIDE], int parity, bool shrink, int warp, int lane) {
  if (shrink) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float a = sh.row[parity][m * 16 + (lane >> 2)], b = sh.row[parity][m * 16 + 8 + (lane >> 2)];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        acc[m][n][0] *= a; acc[m][n][1] *= a; acc[m][n][2] *= b; acc[m][n][3] *= b;
      }
    }
  }
  u32 p[2][4];
  ldmatrix(p[0], &sh.p[parity][lane & 15][(lane >> 4) * 8]);
  ldmatrix(p[1], &sh.p[parity][16 + (lane & 15)][(lane >> 4) * 8]);
  const T* from = &tile[lane & 15][warp * 64 + (lane >> 4) * 8];
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
  load_tile(sh.k[0], kv, slot_of(own, begin, end, warp, lane), warp, lane);

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
    for (int at = 0; at < nodes; at += KEYS) {
      wait_all();
      __syncthreads();
      scores(sh, sh.k[0], qf, warp, lane);
      __syncthreads();
      if (at + KEYS < nodes) load_tile(sh.k[0], kv, slot_of(own, begin + at + KEYS, end, warp, lane), warp, lane);
      float2 x = whole_scores(sh, my_row, sub, score_scale);
      const u32 word = my_row < rows ? words[(i64)(first_node + node) * width + (at >> 5)] >> ((at & 31) + sub * 2) : 0u;
      const int left = nodes - at - sub * 2;
      x.x = (word & 1u) && left > 0 ? x.x : NEG_INF;
      x.y = (word & 2u) && left > 1 ? x.y : NEG_INF;
      *reinterpret_cast<float2*>(&tree[my_row * TREE_STRIDE + at + sub * 2]) = x;
      top = fmaxf(top, fmaxf(x.x, x.y));
    }
#pragma unroll
    for (int d = 1; d < 8; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float base = top == NEG_INF ? 0.f : top;
    __syncwarp();
    for (int at = sub; at < nodes; at += 8) {
      float* x = &tree[my_row * TREE_STRIDE + at];
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
    for (int at = 0; at < nodes; at += KEYS) {
      __syncthreads();
      if (nodes > KEYS) {
        load_tile(sh.k[0], kv, slot_of(own, begin + at, end, warp, lane), warp, lane);
        wait_all();
        __syncthreads();
      }
      for (int j = 0; j < min(KEYS, nodes - at); ++j) {
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
  load_tile(sh.k[1], kv, slot_of(own, begin + KEYS, end, warp, lane), warp, lane);
  Index slot = slot_of(own, begin + 2 * KEYS, end, warp, lane), slot_after = slot_of(own, begin + 3 * KEYS, end, warp, lane);
  bool shrunk = false;
  const int tiles = (end - begin + KEYS - 1) / KEYS;
  for (int i = 0; i < tiles; ++i) {
    wait_all_but_newest();
    // Tile i is here, P of tile i - 1 too, and nobody reads tile i - 2 any more.
    const bool rescale = __syncthreads_or(shrunk);
    load_tile(sh.k[(i + 2) % STAGES], kv, slot, warp, lane);
    slot = slot_after;
    slot_after = slot_of(own, begin + (i + 4) * KEYS, end, warp, lane);
    scores(sh, sh.k[i % STAGES], qf, warp, lane);
    __syncthreads();
    float2 x = whole_scores(sh, my_row, sub, score_scale);
    // The products of the tile before run in the tensor cores while this tile's softmax runs beside them.
    if (i > 0) accumulate(sh, acc, sh.k[(i - 1) % STAGES], (i - 1) & 1, rescale, warp, lane);
    const int left = end - begin - i * KEYS - sub * 2;
    x.x = left > 0 ? x.x : NEG_INF;
    x.y = left > 1 ? x.y : NEG_INF;
    float higher = fmaxf(x.x, x.y);
#pragma unroll
    for (int d = 1; d < 8; d <<= 1) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, d));
    // A row moves its base only when a score passes it by 2^8: P stays well within its dtype, and most tiles rescale
    // nothing. The decision is the row's own, so its neighbours cannot move its bits.
    float shrink = 1.f;
    if (higher > top + 8.f) {
      shrink = exp2f(top - higher);
      top = higher;
    }
    x.x = exp2f(x.x - top);
    x.y = exp2f(x.y - top);
    total = total * shrink + (x.x + x.y);
    T packed[2] = {narrow(x.x), narrow(x.y)};
    *reinterpret_cast<u32*>(&sh.p[i & 1][my_row][sub * 2]) = *reinterpret_cast<u32*>(packed);
    if (sub == 0) sh.row[i & 1][my_row] = shrink;
    shrunk = shrink != 1.f;
  }
  const bool rescale = __syncthreads_or(shrunk);
  accumulate(sh, acc, sh.k[(tiles - 1) % STAGES], (tiles - 1) & 1, rescale, warp, lane);
  __syncthreads();
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
