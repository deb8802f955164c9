// This header says which operations of binary.cu, select.cu and cast.cu exist for which dtypes. It needs no CUDA, so
// that whoever calls their entries can ask before a call.
#pragma once

#include <string_view>

namespace msops {

// Operation has the numbers of MindSpore's BinaryOpType.
enum Operation : int {
  kGreater = 0,
  kLess = 1,
  kEqual = 2,
  kGreaterEqual = 3,
  kLessEqual = 4,
  kNotEqual = 5,
  kLogicalAnd = 6,
  kLogicalOr = 7,
  kMaximum = 8,
  kMinimum = 9,
  kAdd = 10,
  kSub = 11,
  kMul = 12,
  kDiv = 13,
  kPow = 14,
  kRealDiv = 15,
  kSquaredDifference = 21,
  kDivNoNan = 27,
  kMulNoNan = 28,
  kAddExt = 32,
  kSubExt = 33,
};

namespace broadcast {

constexpr bool is_float(std::string_view dtype) {
  return dtype == "float16" || dtype == "float32" || dtype == "float64";
}
constexpr bool is_integer(std::string_view dtype) { return dtype == "int32" || dtype == "int64"; }

}  // namespace broadcast

// Returns whether BinaryForward has the operation at all.
constexpr bool is_binary(int op) {
  return (kMaximum <= op && op <= kRealDiv) || op == kSquaredDifference || op == kDivNoNan || op == kMulNoNan;
}

// Returns whether BinaryForward has the operation for tensors of the dtype. Whole numbers are not divided here: there,
// MindSpore's functions for GPUs differ among each other and from NumPy.
constexpr bool has_binary(int op, std::string_view dtype) {
  if (broadcast::is_float(dtype)) return is_binary(op);
  if (dtype == "bool") return op == kMaximum || op == kMinimum || op == kMul;
  return broadcast::is_integer(dtype) && is_binary(op) && op != kDiv && op != kRealDiv && op != kDivNoNan;
}

// Returns the same of BinaryMixedForward, whose result is float32.
constexpr bool has_mixed(int op, std::string_view x, std::string_view y) {
  return (op == kMul || op == kDiv) && ((x == "float16" && y == "float32") || (x == "float32" && y == "float16"));
}

// Returns the same of CompareForward, whose result is bool.
constexpr bool has_comparison(int op, std::string_view dtype) {
  const bool known = broadcast::is_float(dtype) || broadcast::is_integer(dtype) || dtype == "bool";
  return kGreater <= op && op <= kLogicalOr && known;
}

// Returns the same of BinaryExtForward, whose alpha has a dtype of its own.
constexpr bool has_binary_ext(int op, std::string_view dtype, std::string_view alpha) {
  const bool whole = alpha == "int64";
  return (op == kAddExt || op == kSubExt) &&
         (broadcast::is_float(dtype) ? whole || alpha == "float32" : broadcast::is_integer(dtype) && whole);
}

// CastForward's attribute `to` is a place in this list.
constexpr std::string_view kCastDtypes[] = {"bool", "float16", "float32", "float64", "int32", "int64"};

constexpr int cast_place(std::string_view dtype) {
  for (int i = 0; i < 6; ++i)
    if (kCastDtypes[i] == dtype) return i;
  return -1;
}

// Returns whether CastForward casts numbers of one dtype to another one.
constexpr bool has_cast(std::string_view from, std::string_view to) {
  const auto known = [](std::string_view dtype) { return cast_place(dtype) >= 0; };
  const bool twice = (from == "float16" && to == "float64") || (from == "float64" && to == "float16");
  return known(from) && known(to) && from != to && !twice;
}

// Returns whether SelectForward takes tensors of the dtype.
constexpr bool has_select(std::string_view dtype) {
  constexpr std::string_view kIntegers[] = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"};
  for (const std::string_view each : kIntegers)
    if (dtype == each) return true;
  return broadcast::is_float(dtype) || dtype == "bool";
}

}  // namespace msops
