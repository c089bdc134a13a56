// Arguments of a linear, and its epilogue.
#pragma once

#include <type_traits>

#include "cpu/context.hpp"
#include "cpu/gemm.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct linear_args {
  View x, weight, weight_scale, weight_zero, input_scale, bias, residual, row_scale, scale_unit, out;
  std::int64_t M;
};

namespace detail {

// Bytes of E2M1 weights are E4M3 where there is a unit, else E8M0.
template <class C>
constexpr gemm::Scales kLinearScales = !std::is_same_v<typename C::weight_scale_t, std::uint8_t> ? gemm::Scales::floats
                                       : C::weight_dtype == DType::iq4                           ? gemm::Scales::iq4
                                       : std::is_same_v<typename C::scale_unit_t, none>          ? gemm::Scales::e8m0
                                                                                                 : gemm::Scales::e4m3;

template <class C>
using LinearProduct =
    gemm::Product<typename C::x_t, C::weight_dtype, C::activation, C::group_size,
                  !std::is_same_v<typename C::weight_zero_t, none>, C::layout, kLinearScales<C>>;

template <class C>
gemm::Weights linear_weights(const linear_args& a) {
  gemm::Weights weights{a.weight.row<const std::byte>(0), a.weight_scale.row<const float>(0),
                        a.weight_zero.row<const std::uint8_t>(0), C::N, C::K};
  if constexpr (LinearProduct<C>::kByteScales) {
    weights.scale = nullptr;
    weights.scale_codes = a.weight_scale.row<const std::uint8_t>(0);
  }
  return weights;
}

// Everything after the sums of one row and up to 16 columns.
template <class C>
class LinearEpilogue {
  using P = LinearProduct<C>;
  template <class T>
  static constexpr bool kHas = !std::is_same_v<T, none>;

 public:
  explicit LinearEpilogue(const linear_args& args) : a_(args), input_scale_(args.input_scale.scalar()) {}

  void operator()(std::int64_t row, std::int64_t first, std::int64_t columns, const float* sums) const {
    for_vectors(columns, [&](std::int64_t i, auto n) TRTC_INLINE_LAMBDA {
      const std::int64_t column = first + i;
      Floats value = load(sums + i, n);
      if constexpr (kHas<typename C::weight_scale_t> && !P::kGrouped) {
        value = value * load(a_.weight_scale.row<const float>(0) + column, n);
      }
      if constexpr (kHas<typename C::scale_unit_t>) value = value * load(a_.scale_unit.row<const float>(0) + column, n);
      if constexpr (kHas<typename C::input_scale_t>) value = value * input_scale_;
      if constexpr (kHas<typename C::row_scale_t>) {
        static_assert(C::scales == 1, "scales of groups are multiplied into x before");
        value = value * *a_.row_scale.row<const float>(row);
      }
      if constexpr (kHas<typename C::bias_t>) value = value + load(a_.bias.row<const float>(0) + column, n);
      if constexpr (C::softcap != 0.f) value = C::softcap * tanh(value / C::softcap);
      if constexpr (kHas<typename C::residual_t>) {
        value = value + load(a_.residual.row<const typename C::residual_t>(row) + column, n);
      }
      store(a_.out.row<typename C::out_t>(row) + column, value, n);
    });
  }

 private:
  const linear_args& a_;
  float input_scale_;
};

}  // namespace detail

}  // namespace trtc
