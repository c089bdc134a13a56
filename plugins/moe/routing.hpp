// Which experts a row goes to, and with what weights: what plugins/moe/routing.py defines.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cpu/types.hpp"

namespace trtc::moe_detail {

template <class T>
constexpr bool kPresent = !std::is_same_v<T, none>;

inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

// scores[E] of a row's logits.
template <class C>
void score(const float* logits, float* scores) {
  if constexpr (C::score == Score::sigmoid) {
    for (std::int64_t e = 0; e < C::E; ++e) scores[e] = sigmoid(logits[e]);
  } else {
    float largest = logits[0];
    for (std::int64_t e = 1; e < C::E; ++e) largest = logits[e] > largest ? logits[e] : largest;
    float total = 0.f;
    for (std::int64_t e = 0; e < C::E; ++e) {
      scores[e] = std::exp(logits[e] - largest);
      total += scores[e];
    }
    for (std::int64_t e = 0; e < C::E; ++e) scores[e] /= total;
  }
}

// The largest of values[count] that is not taken yet (ties: the lower index), which is then taken.
inline std::int64_t take_best(const float* values, bool* taken, std::int64_t count) {
  std::int64_t best = -1;
  for (std::int64_t i = 0; i < count; ++i) {
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  }
  taken[best] = true;
  return best;
}

// What a group of experts is chosen by.
template <class C, std::int64_t kSize>
float score_group(const float* ranks) {
  bool taken[kSize] = {};
  const float largest = ranks[take_best(ranks, taken, kSize)];
  if constexpr (C::group_score == GroupScore::max || kSize == 1) return largest;
  return largest + ranks[take_best(ranks, taken, kSize)];
}

// Takes the experts outside of a row's best groups.
template <class C>
void close_groups(const float* ranks, bool* taken) {
  constexpr std::int64_t kSize = C::E / C::num_groups;
  static_assert(kSize * C::num_groups == C::E, "groups are equal");
  float scores[C::num_groups];
  for (std::int64_t g = 0; g < C::num_groups; ++g) scores[g] = score_group<C, kSize>(ranks + g * kSize);
  bool open[C::num_groups] = {};
  for (std::int64_t i = 0; i < C::top_groups; ++i) take_best(scores, open, C::num_groups);
  for (std::int64_t e = 0; e < C::E; ++e) taken[e] = !open[e / kSize];
}

// SparseMixer: the experts and the sum of their weights. Each has its softmax among the experts that are left and
// whose logits are near its own.
template <class C>
float route_one_after_another(const float* logits, std::int32_t* experts, float* weights) {
  bool taken[C::E] = {};
  float chosen = 0.f;
  for (std::int64_t rank = 0; rank < C::top_k; ++rank) {
    bool left[C::E];
    for (std::int64_t e = 0; e < C::E; ++e) left[e] = !taken[e];
    const std::int64_t best = take_best(logits, taken, C::E);
    const float largest = logits[best];
    float total = 0.f;
    for (std::int64_t e = 0; e < C::E; ++e) {
      const float size = std::fabs(logits[e]);
      const float bound = static_cast<float>(C::margin) * (size > largest ? size : largest);
      if (left[e] && largest - logits[e] <= bound) total += std::exp(logits[e] - largest);
    }
    experts[rank] = static_cast<std::int32_t>(best);
    weights[rank] = 1.f / total;
    chosen += weights[rank];
  }
  return chosen;
}

// By scores of all experts: the experts and the sum of their weights. Logits rank as their scores do, and still
// differ where those are rounded to one.
template <class C>
float route_by_scores(const float* logits, const View& choice_bias, std::int32_t* experts, float* weights) {
  constexpr bool kBiased = kPresent<typename C::choice_bias_t>;
  float scores[C::E], biased[C::E];
  score<C>(logits, scores);
  const float* ranks = C::num_groups > 1 ? scores : logits;
  if constexpr (kBiased) {
    const float* bias = choice_bias.row<const float>(0);
    for (std::int64_t e = 0; e < C::E; ++e) biased[e] = scores[e] + bias[e];
    ranks = biased;
  }
  bool taken[C::E] = {};
  if constexpr (C::num_groups > 1) close_groups<C>(ranks, taken);
  float chosen = 0.f;
  for (std::int64_t rank = 0; rank < C::top_k; ++rank) {
    const std::int64_t best = take_best(ranks, taken, C::E);
    experts[rank] = static_cast<std::int32_t>(best);
    weights[rank] = scores[best];
    chosen += weights[rank];
  }
  return chosen;
}

// The top_k experts of one row, the one that ranks first in front (ties: the lower index), and their
// weights.
template <class C>
void route(const float* logits, const View& choice_bias, const View& expert_scale, std::int32_t* experts,
           float* weights) {
  float chosen;
  if constexpr (C::score == Score::sparsemixer) {
    chosen = route_one_after_another<C>(logits, experts, weights);
  } else {
    chosen = route_by_scores<C>(logits, choice_bias, experts, weights);
  }
  for (std::int64_t rank = 0; rank < C::top_k; ++rank) {
    if constexpr (C::renormalize != 0) weights[rank] /= chosen + static_cast<float>(C::epsilon);
    weights[rank] *= static_cast<float>(C::scale);
    if constexpr (kPresent<typename C::expert_scale_t>) {
      weights[rank] *= expert_scale.row<const float>(0)[experts[rank]];
    }
  }
}

}  // namespace trtc::moe_detail
