"""What the ResNet-50 trainer of examples/ is made of, beside the builders of its net."""
