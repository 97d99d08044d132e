"""Learning from few labels: distillation, Noisy Student, S4L and VIVI."""
