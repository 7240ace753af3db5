"""What every bench needs, whatever it measures.

`bench` is the class that a file of rows fills in, `run` measures its rows and `command` its command line; below them
`timing` (calls in turn), `arrays` (inputs that rows share), `launch` (kernels without the public call around them),
`results` (files), `machine` (the card and the tools beside it) and `picture`.
"""
