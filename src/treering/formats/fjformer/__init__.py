"""Reads and writes the streams of FJFormer and EasyLM."""
