// Activations of gates. Included once per instruction set, after vec.h.

QUIRE_INLINE Floats silu(Floats x) {
  // Where e^-x is too large for a float, the result is too small for one.
  return x < -87.0f ? Floats{} : x / (exponential(-x) + 1.0f);
}

// GELU in its tanh approximation.
QUIRE_INLINE Floats gelu_tanh(Floats x) {
  constexpr float kSqrtTwoOverPi = 0.7978845608f;
  const Floats inner = (x + x * x * x * 0.044715f) * kSqrtTwoOverPi;
  return x * 0.5f * (hyperbolic_tangent(inner) + 1.0f);
}

QUIRE_INLINE Floats activated(Activation activation, Floats x) {
  return activation == Activation::kSilu ? silu(x) : gelu_tanh(x);
}
