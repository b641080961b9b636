/* The CUDA runtime: whether a text is PTX, as CUDA's compiler says when a program loads it. Only what is no PTX of any version is
 * wrong here: what PTX has and simulated GPUs do not run is refused when its kernel is launched. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

#include "images.h"

/* Of PTX up to this version. Newer ones may have others. */
enum { KNOWN_MAJOR = 9, KNOWN_MINOR = 0 };

static const char *const opcodes[] = {
    "abs", "activemask", "add", "addc", "alloca", "and", "applypriority", "atom", "bar", "barrier", "bfe", "bfi",
    "bfind", "bmsk", "bra", "brev", "brkpt", "brx", "call", "clusterlaunchcontrol", "clz", "cnot", "copysign", "cos",
    "cp", "createpolicy", "cvt", "cvta", "discard", "div", "dp2a", "dp4a", "elect", "ex2", "exit", "fence", "fma",
    "fns", "getctarank", "griddepcontrol", "isspacep", "istypep", "ld", "ldmatrix", "ldu", "lg2", "lop3", "mad",
    "mad24", "madc", "mapa", "match", "max", "mbarrier", "membar", "min", "mma", "mov", "movmatrix", "mul", "mul24",
    "multimem", "nanosleep", "neg", "not", "or", "pmevent", "popc", "prefetch", "prefetchu", "prmt", "rcp", "red",
    "redux", "rem", "ret", "rsqrt", "sad", "selp", "set", "setmaxnreg", "setp", "shf", "shfl", "shl", "shr", "sin",
    "slct", "sqrt", "st", "stackrestore", "stacksave", "stmatrix", "sub", "subc", "suld", "suq", "sured", "sust",
    "szext", "tanh", "tcgen05", "tensormap", "testp", "tex", "tld4", "trap", "txq", "vabsdiff", "vabsdiff2",
    "vabsdiff4", "vadd", "vadd2", "vadd4", "vavrg2", "vavrg4", "vmad", "vmax", "vmax2", "vmax4", "vmin", "vmin2",
    "vmin4", "vote", "vset", "vset2", "vset4", "vshl", "vshr", "vsub", "vsub2", "vsub4", "wgmma", "wmma", "xor",
};

/* Opcodes of which all modifiers in letters are known, and those. Newer modifiers have digits or "::". */
static const char *const complete_opcodes[] = {
    "abs", "add", "and", "bra", "cvt", "div", "exit", "fma", "ld", "mad", "max", "min", "mov", "mul", "neg", "not",
    "or", "rcp", "rem", "ret", "rsqrt", "selp", "setp", "shl", "shr", "sqrt", "st", "sub", "xor",
};
static const char *const modifiers[] = {
    "NaN", "abs", "acq_rel", "acquire", "and", "approx", "async", "bulk", "ca", "cc", "cg", "cluster", "const", "cs",
    "cta", "cv", "eq", "equ", "ftz", "full", "ge", "geu", "global", "gpu", "gt", "gtu", "hi", "hs", "le", "leu", "lo",
    "local", "ls", "lt", "ltu", "lu", "mmio", "nan", "nc", "ne", "neu", "noftz", "num", "oob", "or", "pack", "param",
    "pred", "relaxed", "release", "relu", "rm", "rmi", "rn", "rna", "rni", "rp", "rpi", "rs", "rz", "rzi", "sat",
    "satfinite", "scaled", "shared", "sys", "to", "uni", "unified", "volatile", "wb", "weak", "wide", "wt", "xor",
    "xorsign",
};

struct word {
    const char *start;
    size_t length;
};

struct text {
    const char *start, *at, *end;
    char *log;
    size_t log_size;
};

static cudaError_t report(const struct text *text, const char *problem, struct word word)
{
    int line = 1;
    for (const char *at = text->start; at < text->at && at < text->end; at++)
        line += *at == '\n';
    snprintf(text->log, text->log_size, "ptxas application ptx input, line %d; error   : %s '%.*s'\n"
             "ptxas fatal   : Ptx assembly aborted due to errors", line, problem, (int)word.length, word.start);
    return ERROR_INVALID_PTX;
}

static int compare(const void *key, const void *item)
{
    const struct word *word = key;
    const char *const *name = item;
    const int order = strncmp(word->start, *name, word->length);
    return order ? order : -(int)(unsigned char)(*name)[word->length];
}

#define IS_IN(names, word) (bsearch(&(word), names, sizeof names / sizeof *names, sizeof *names, compare) != NULL)

static bool is_word(const struct word *word, const char *name)
{
    return word->length == strlen(name) && memcmp(word->start, name, word->length) == 0;
}

static bool is_name(char letter)
{
    return isalnum((unsigned char)letter) || (letter && strchr("_$%", letter));
}

/* The character at the text's place, or 0 at its end. */
static char next(const struct text *text)
{
    return text->at < text->end ? *text->at : '\0';
}

static void skip_to(struct text *text, const char *end)
{
    const char *found = text->at < text->end ? memmem(text->at, (size_t)(text->end - text->at), end, strlen(end)) : NULL;
    text->at = found ? found + strlen(end) : text->end;
}

static void skip_blank(struct text *text)
{
    while (text->at < text->end) {
        const bool may_begin = *text->at == '/' && text->end - text->at > 1;
        if (isspace((unsigned char)*text->at))
            text->at++;
        else if (may_begin && (text->at[1] == '/' || text->at[1] == '*'))
            skip_to(text, text->at[1] == '/' ? "\n" : "*/");
        else
            return;
    }
}

static struct word read_name(struct text *text)
{
    const char *start = text->at;
    while (is_name(next(text)))
        text->at++;
    return (struct word){start, (size_t)(text->at - start)};
}

/* Goes on behind the braces that begin here. */
static void skip_braces(struct text *text)
{
    int depth = 0;
    do {
        skip_blank(text);
        depth += next(text) == '{' ? 1 : next(text) == '}' ? -1 : 0;
        text->at += text->at < text->end;
    } while (depth > 0 && text->at < text->end);
}

/* Goes on behind the semicolon of a statement, or, in a directive, before the body of a function. */
static bool skip_statement(struct text *text, bool is_directive)
{
    bool has_value = false;
    for (;;) {
        skip_blank(text);
        const char letter = next(text);
        if (letter == '\0' || letter == '}')
            return false;
        if (letter == '{' && is_directive && !has_value)
            return true;
        if (letter == '{') {
            skip_braces(text);
            continue;
        }
        text->at++;
        if (letter == ';')
            return true;
        if (letter == '"')
            skip_to(text, "\"");
        has_value |= letter == '=';
    }
}

static cudaError_t check_directive(struct text *text)
{
    text->at++;
    const struct word word = read_name(text);
    if (is_word(&word, "loc") || is_word(&word, "file")) {
        skip_to(text, "\n");
    } else if (is_word(&word, "section")) {
        skip_to(text, "{");
        skip_to(text, "}");
    } else if (is_word(&word, "version") || is_word(&word, "target") || is_word(&word, "address_size")) {
        do {
            text->at += next(text) == ',';
            skip_blank(text);
            while (is_name(next(text)) || next(text) == '.')
                text->at++;
        } while (next(text) == ',');
    } else if (word.length == 0 || !skip_statement(text, true)) {
        return report(text, "Parsing error near", word);
    }
    return SUCCESS;
}

static cudaError_t check_instruction(struct text *text, struct word opcode, bool is_known)
{
    if (is_known && !IS_IN(opcodes, opcode))
        return report(text, "Not a name of any known instruction:", opcode);
    const bool is_complete = IS_IN(complete_opcodes, opcode);
    while (next(text) == '.') {
        text->at++;
        struct word modifier = read_name(text);
        bool is_checked = is_complete && modifier.length > 0;
        for (size_t i = 0; i < modifier.length; i++)
            is_checked &= !isdigit((unsigned char)modifier.start[i]); /* types have digits */
        while (next(text) == ':' && text->end - text->at > 1 && text->at[1] == ':') {
            text->at += 2;
            read_name(text);
            is_checked = false;
        }
        if (is_checked && !IS_IN(modifiers, modifier))
            return report(text, "Unknown modifier", modifier);
    }
    return skip_statement(text, false) ? SUCCESS : report(text, "Parsing error near", opcode);
}

static cudaError_t check_statement(struct text *text, bool is_in_function, bool is_known)
{
    if (next(text) == '.')
        return check_directive(text);
    if (next(text) == '@') {
        text->at++;
        skip_blank(text);
        text->at += next(text) == '!';
        skip_blank(text);
        read_name(text);
        skip_blank(text);
    }
    const struct word word = read_name(text);
    skip_blank(text);
    if (word.length && next(text) == ':') {
        text->at++;
        return SUCCESS;
    }
    if (!is_in_function || word.length == 0)
        return report(text, "Parsing error near", word.length ? word : (struct word){text->at, text->at < text->end});
    return check_instruction(text, word, is_known);
}

cudaError_t check_ptx(const char *data, size_t size, char *log, size_t log_size)
{
    static const char beginning[] = ".version";
    const char *nul = memchr(data, '\0', size);
    struct text text = {data, data, nul ? nul : data + size, log, log_size};
    int major = 0, minor = 0, depth = 0;
    char version[16];
    skip_blank(&text);
    if (text.end - text.at < (ptrdiff_t)sizeof beginning || memcmp(text.at, beginning, sizeof beginning - 1) != 0)
        return ERROR_INVALID_IMAGE;
    snprintf(version, sizeof version, "%.*s", (int)(text.end - text.at - 8 < 15 ? text.end - text.at - 8 : 15), text.at + 8);
    if (sscanf(version, "%d.%d", &major, &minor) != 2)
        return report(&text, "Parsing error near", (struct word){text.at, 8});
    const bool is_known = major < KNOWN_MAJOR || (major == KNOWN_MAJOR && minor <= KNOWN_MINOR);
    if (!memmem(data, (size_t)(text.end - data), ".target", 7))
        return report(&text, "Missing .target directive at", (struct word){"start of file", 13});
    while (skip_blank(&text), text.at < text.end) {
        const char letter = *text.at;
        if (letter == '{' || letter == '}') {
            text.at++;
            depth += letter == '{' ? 1 : -1;
            if (depth < 0)
                return report(&text, "Parsing error near", (struct word){"}", 1});
        } else if (letter == ';') {
            text.at++;
        } else {
            RETURN_IF_ERROR(check_statement(&text, depth > 0, is_known));
        }
    }
    return depth == 0 ? SUCCESS : report(&text, "Parsing error near", (struct word){"end of file", 11});
}
