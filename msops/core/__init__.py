"""Turns a C entry into a MindSpore operator.

The modules have an order; none imports one that stands after it.

- What describes an operator: `spec`, `signature`, `rules`, `settings`, `library`, `abi` and, on these, `definition`.
- What compiles it: `build` makes libraries; `cached` and `compiled` serve code that MindSpore compiles; `gradients` and
  `open_sizes` serve `primitive`, which is what MindSpore runs.
- What calls it: `inputs`, `operator`, `factory` and `fast_calls`.
"""
