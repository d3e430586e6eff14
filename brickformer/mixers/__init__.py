"""Mixers: move information along time. One slot: attention, and whatever takes its place."""
