"""What happens around the computation: ranks, signals, progress, figures, traces, costs."""
