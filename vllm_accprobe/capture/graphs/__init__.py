"""Taps inside compiled and captured graphs: operators instead of Python around a call."""
