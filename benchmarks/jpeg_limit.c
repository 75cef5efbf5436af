/* A lower bound for any loader on the CPU: libjpeg-turbo decodes random crops and does nothing else.
 *
 *     cc -O2 -o jpeg_limit jpeg_limit.c -ljpeg -lm -lpthread
 *     ./jpeg_limit LIST THREADS BATCH_SIZE
 *
 * LIST has a line "path <tab> offset <tab> bytes <tab> ..." per JPEG. All of them are read into memory first, so that no
 * file is opened while the clock runs. Controlled like every contestant of loader.py (see loader_peers.py): it prints
 * "ready"; for each line "TOTAL UNTIMED" on stdin it decodes TOTAL batches and prints the wall seconds of all but the
 * first UNTIMED.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <jpeglib.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or later needed: apt-get install libjpeg-dev"
#endif

enum { CROP_ATTEMPTS = 10, MAX_PATH = 4096 };
static const double MIN_AREA = 0.08, MIN_RATIO = 3.0 / 4, MAX_RATIO = 4.0 / 3;

typedef struct {
    unsigned char *data;
    unsigned long bytes;
} Jpeg;

typedef struct {
    unsigned top, left, height, width;
} Crop;

static Jpeg *jpegs;
static long jpeg_count;
static atomic_long next_image; /* of this turn; the threads take one after the other */
static long last_image;
static long first_image; /* where in the list this turn begins: each goes on from the last one */
static unsigned short stream; /* a new stream of random numbers for each thread of each turn */

static void fail(const char *what, const char *detail) {
    fprintf(stderr, "jpeg_limit: %s: %s\n", what, detail);
    exit(2);
}

static void fail_in_libjpeg(j_common_ptr decoder) {
    char message[JMSG_LENGTH_MAX];
    decoder->err->format_message(decoder, message);
    fail("a JPEG cannot be decoded", message);
}

static void ignore_warning(j_common_ptr decoder) { (void)decoder; }

static void *allocate(size_t bytes) {
    void *memory = malloc(bytes);
    if (!memory) fail("out of memory", "reading the images");
    return memory;
}

static void read_images(const char *list) {
    FILE *lines = fopen(list, "r");
    if (!lines) fail("cannot open the list", list);
    char line[MAX_PATH];
    long capacity = 0;
    while (fgets(line, sizeof line, lines)) {
        char *tab = strchr(line, '\t');
        unsigned long offset, bytes;
        if (!tab || sscanf(tab, "%lu %lu", &offset, &bytes) != 2) fail("not a line of path, offset, bytes", line);
        *tab = '\0';
        if (jpeg_count == capacity) {
            capacity = capacity ? 2 * capacity : 1024;
            jpegs = realloc(jpegs, capacity * sizeof *jpegs);
            if (!jpegs) fail("out of memory", list);
        }
        FILE *file = fopen(line, "rb");
        Jpeg jpeg = {allocate(bytes), bytes};
        if (!file || fseek(file, offset, SEEK_SET) || fread(jpeg.data, 1, bytes, file) != bytes) fail("cannot read", line);
        fclose(file);
        jpegs[jpeg_count++] = jpeg;
    }
    fclose(lines);
    if (!jpeg_count) fail("no images in", list);
}

/* Random resized crop: the ten attempts and the fallback of torchvision. */
static Crop random_crop(unsigned width, unsigned height, unsigned short state[3]) {
    for (int attempt = 0; attempt < CROP_ATTEMPTS; attempt++) {
        double area = width * (double)height * (MIN_AREA + erand48(state) * (1 - MIN_AREA));
        double ratio = exp(log(MIN_RATIO) + erand48(state) * (log(MAX_RATIO) - log(MIN_RATIO)));
        unsigned w = lround(sqrt(area * ratio)), h = lround(sqrt(area / ratio));
        if (w > 0 && w <= width && h > 0 && h <= height) {
            Crop crop = {erand48(state) * (height - h + 1), erand48(state) * (width - w + 1), h, w};
            return crop;
        }
    }
    unsigned w = width > MAX_RATIO * height ? lround(height * MAX_RATIO) : width;
    unsigned h = height > width / MIN_RATIO ? lround(width / MIN_RATIO) : height;
    Crop crop = {(height - h) / 2, (width - w) / 2, h, w};
    return crop;
}

/* Decode the crop's rows, and of these the columns that hold the crop (libjpeg widens them to whole blocks). */
static void decode_crop(j_decompress_ptr decoder, const Jpeg *jpeg, unsigned short state[3], JSAMPLE **row, size_t *room) {
    jpeg_mem_src(decoder, jpeg->data, jpeg->bytes);
    jpeg_read_header(decoder, TRUE);
    if (decoder->num_components == 4)
        decoder->out_color_space = JCS_CMYK; /* libjpeg makes no RGB of it */
    else
        decoder->out_color_space = JCS_RGB;
    Crop crop = random_crop(decoder->image_width, decoder->image_height, state);
    jpeg_start_decompress(decoder);
    JDIMENSION left = crop.left, width = crop.width;
    jpeg_crop_scanline(decoder, &left, &width);
    jpeg_skip_scanlines(decoder, crop.top);
    size_t needed = (size_t)crop.height * width * decoder->output_components;
    if (*room < needed) {
        free(*row);
        *row = allocate(needed);
        *room = needed;
    }
    JSAMPLE *out = *row; /* a whole crop is written, as every loader has to */
    for (unsigned y = 0; y < crop.height; y++, out += (size_t)width * decoder->output_components)
        jpeg_read_scanlines(decoder, &out, 1);
    jpeg_abort_decompress(decoder); /* the rows below are not looked at */
}

static void *work(void *state) {
    struct jpeg_error_mgr errors;
    struct jpeg_decompress_struct decoder;
    decoder.err = jpeg_std_error(&errors);
    errors.error_exit = fail_in_libjpeg;
    errors.output_message = ignore_warning;
    jpeg_create_decompress(&decoder);
    JSAMPLE *pixels = NULL;
    size_t room = 0;
    long image;
    while ((image = atomic_fetch_add(&next_image, 1)) < last_image)
        decode_crop(&decoder, &jpegs[(first_image + image) % jpeg_count], state, &pixels, &room);
    jpeg_destroy_decompress(&decoder);
    free(pixels);
    return NULL;
}

static double decode_images(long images, int threads) {
    struct timespec begin, end;
    pthread_t pool[threads];
    unsigned short states[threads][3];
    clock_gettime(CLOCK_MONOTONIC, &begin);
    atomic_store(&next_image, 0);
    last_image = images;
    for (int i = 0; i < threads; i++) {
        memcpy(states[i], (unsigned short[3]){0x330e, stream * 40503u, stream}, sizeof states[i]);
        stream++;
        if (pthread_create(&pool[i], NULL, work, states[i])) fail("cannot start", "a thread");
    }
    for (int i = 0; i < threads; i++) pthread_join(pool[i], NULL);
    clock_gettime(CLOCK_MONOTONIC, &end);
    first_image += images;
    return end.tv_sec - begin.tv_sec + 1e-9 * (end.tv_nsec - begin.tv_nsec);
}

int main(int argc, char **argv) {
    if (argc != 4 || atoi(argv[2]) < 1 || atoi(argv[3]) < 1) fail("usage", "jpeg_limit LIST THREADS BATCH_SIZE");
    int threads = atoi(argv[2]), batch_size = atoi(argv[3]);
    read_images(argv[1]);
    puts("ready");
    fflush(stdout);
    long total, untimed;
    while (scanf("%ld %ld", &total, &untimed) == 2) {
        decode_images(untimed * batch_size, threads);
        printf("%.6f\n", decode_images((total - untimed) * batch_size, threads));
        fflush(stdout);
    }
    return 0;
}
