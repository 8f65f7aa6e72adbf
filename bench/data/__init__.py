"""What preparing, packing and loading data costs."""
