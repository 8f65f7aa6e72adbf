"""Trackers: one file for each place that shows the figures of a training run."""
