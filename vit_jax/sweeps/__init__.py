"""Many runs of one config: axes, choosing, running, refusing."""
