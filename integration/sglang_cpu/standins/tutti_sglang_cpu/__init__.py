"""What SGLang 0.5.23 misses on a machine without a GPU; installed by ../../setup.sh.

`boot` runs at interpreter start and waits for `import sglang`; `plugin` is an SGLang plugin that
gives HiCache copy functions (`copies`) and unpinned host memory. None edits SGLang's files, and all
stay out of the way where torch is built for CUDA.
"""
