"""Trained nets in other formats: ONNX, safetensors, torch."""
