"""Records MindSpore's work on a GPU into CUDA graphs, and replays them; see cuda_graph.py."""
