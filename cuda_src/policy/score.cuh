// What happens to a score between Q K^T and the mask. A modifier is a type with a static `apply(score)`; ScoreMods
// composes them in order. Scores arrive as the plain products q . k; softmax_scale sits in the exponent's multiply-add.
#pragma once

#include "core/types.cuh"

namespace fa2 {

// Flips the sign. The softmax takes maxima before it scales, which is right for positive scales only: a negative
// softmax_scale is the positive one on flipped scores.
struct Negate {
  static float apply(float score) { return -score; }
};

template <class... Mods>
struct ScoreMods {
  static constexpr bool kNone = sizeof...(Mods) == 0;
  static float apply(float score) {
    ((score = Mods::apply(score)), ...);
    return score;
  }
};

}  // namespace fa2
