"""SSD's augmentation of images and boxes (Liu et al., 2016)."""
