"""What was recorded on real GPUs, and the programs that recorded it. The tests compare simulated GPUs with it."""
