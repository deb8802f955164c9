// The real spherical harmonics of unit vectors, as polynomials of their coordinates, and their first two derivatives

#include "spherical_harmonics/points.h"

using namespace msops;
using namespace msops::harmonics;

namespace {

struct Parameters {
  int64_t degrees;
  Tensor directions;

  explicit Parameters(Call& call)
      : degrees(call.attribute("degree", 1, kMostDegrees)), directions(call.tensor("directions", 2)) {}

  void require_points(Call& call, const Tensor& tensor) const { call.require_shape(tensor, {directions.dim(0), 3}); }
  void require_rows(Call& call, const Tensor& tensor) const {
    call.require_shape(tensor, {directions.dim(0), degrees * degrees});
  }
  template <typename T>
  Arrays<T> arrays() const {
    return {directions.dim(0), static_cast<int>(degrees), directions.as<const T>(), nullptr, nullptr, nullptr, nullptr};
  }
};

}  // namespace

// (directions) -> (out)
MSOPS_ENTRY(SphericalHarmonicsForward) {
  const Parameters in(call);
  const Tensor out = call.tensor("out", 2);
  in.require_points(call, in.directions);
  in.require_rows(call, out);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    Arrays<T> all = in.arrays<T>();
    all.out = out.as<T>();
    run<Forward>(call, all);
  });
}

// (directions, dout) -> (ddirections)
MSOPS_ENTRY(SphericalHarmonicsBackward) {
  const Parameters in(call);
  const Tensor dout = call.tensor("dout", 2), ddirections = call.tensor("ddirections", 2);
  for (const Tensor& tensor : {in.directions, ddirections}) in.require_points(call, tensor);
  in.require_rows(call, dout);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    Arrays<T> all = in.arrays<T>();
    all.dout = dout.as<const T>();
    all.slopes = ddirections.as<T>();
    run<Backward>(call, all);
  });
}

// (directions, dout, dddirections) -> (ddirections, ddout)
MSOPS_ENTRY(SphericalHarmonicsSecondBackward) {
  const Parameters in(call);
  const Tensor dout = call.tensor("dout", 2), dddirections = call.tensor("dddirections", 2);
  const Tensor ddirections = call.tensor("ddirections", 2), ddout = call.tensor("ddout", 2);
  for (const Tensor& tensor : {in.directions, dddirections, ddirections}) in.require_points(call, tensor);
  for (const Tensor& tensor : {dout, ddout}) in.require_rows(call, tensor);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    Arrays<T> all = in.arrays<T>();
    all.dout = dout.as<const T>();
    all.along = dddirections.as<const T>();
    all.slopes = ddirections.as<T>();
    all.out = ddout.as<T>();
    run<SecondBackward>(call, all);
  });
}
