"""FJFormer and EasyLM: streams."""
